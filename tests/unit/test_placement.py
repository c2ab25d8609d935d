"""Where a request goes: the pure part."""

import pytest

from wsbatch.messages import ChatMessage, GenerateRequest, Limits, SamplingParams
from wsbatch.pool.failures import INNOCENT_TOKENS, MAX_IN_A_ROW, FailureHistory, FailureKind
from wsbatch.pool.needs import estimated_tokens, needs
from wsbatch.pool.placement import choose
from wsbatch.pool.prefixes import PrefixTable, beginnings


def asked(prompt: str) -> tuple[int, ...]:
    return beginnings(GenerateRequest(prompt=prompt))


def test_beginnings_are_those_of_whole_blocks() -> None:
    assert asked("x" * 255) == ()
    assert len(asked("x" * 256)) == 1
    assert len(asked("x" * 1023)) == 3
    assert len(asked("x" * 10**6)) == 64
    assert asked("x" * 600)[:2] == asked("x" * 512 + "y" * 88)
    assert asked("x" * 256 + "y" * 256)[0] == asked("x" * 512)[0]
    assert asked("x" * 256 + "y" * 256)[1] != asked("x" * 512)[1]
    assert asked("y" * 256 + "x" * 256)[1] != asked("x" * 512)[1]  # a block means nothing without those before it


def test_ids_and_messages_have_beginnings_too() -> None:
    ids = beginnings(GenerateRequest(token_ids=tuple(range(200))))
    assert len(ids) == 3
    assert ids[:1] == beginnings(GenerateRequest(token_ids=tuple(range(64))))
    system = ChatMessage("system", "s" * 300)
    one = beginnings(GenerateRequest(messages=(system, ChatMessage("user", "a" * 300))))
    other = beginnings(GenerateRequest(messages=(system, ChatMessage("user", "b" * 300))))
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_the_estimate_is_of_prompt_and_output() -> None:
    sampling = SamplingParams(max_tokens=100)
    assert estimated_tokens(GenerateRequest(prompt="x" * 80, sampling=sampling)) == 120
    assert estimated_tokens(GenerateRequest(token_ids=(1,) * 80, sampling=sampling)) == 180
    assert estimated_tokens(GenerateRequest(messages=(ChatMessage("user", "x" * 8),), sampling=sampling)) == 102


def test_the_longest_known_beginning_counts() -> None:
    table: PrefixTable[str] = PrefixTable(max_entries=4)
    assert table.holder(()) is None
    table.remember((1, 2), "a")
    table.remember((1, 2, 3), "b")
    table.remember((1,), "a")
    assert table.holder((1, 2, 3, 4)) == "b"
    assert table.holder((1, 9)) == "a"
    assert table.holder((9,)) is None
    table.remember((5, 6), "c")
    assert len(table) == 4  # the least recently computed, 2, is gone
    assert table.holder((1, 2)) == "a"
    table.forget("b")
    assert table.holder((1, 2, 3)) == "a"


def test_the_holder_is_chosen_within_the_slack() -> None:
    work = {"a": 300.0, "b": 100.0, "c": 100.0}
    assert choose(work, None, slack_tokens=200) == "b"
    assert choose(work, "a", slack_tokens=200) == "a"
    assert choose(work, "a", slack_tokens=199) == "b"
    assert choose(work, "away", slack_tokens=10**9) == "b"


def test_who_is_taken_for_the_cause_of_losses() -> None:
    innocent = FailureHistory()
    assert [innocent.record("killed", None, tokens=tokens) for tokens in (0, INNOCENT_TOKENS, 40, 400)] == [False] * 4
    assert innocent.record("killed", None, tokens=400 + INNOCENT_TOKENS - 1)
    assert [FailureHistory().record("killed", None, tokens=tokens) for tokens in (0, 100)] == [False, False]


@pytest.mark.parametrize("kind", MAX_IN_A_ROW)
def test_failures_in_a_row_are_bounded(kind: FailureKind) -> None:
    request = FailureHistory()
    assert [request.record(kind, None, tokens=3) for _ in range(MAX_IN_A_ROW[kind])] == [
        *[False] * (MAX_IN_A_ROW[kind] - 1),
        True,
    ]
    assert request.count == (0 if kind == "moved" else MAX_IN_A_ROW[kind])
    assert not request.record(kind, None, tokens=3 + INNOCENT_TOKENS)


def test_needs_are_what_is_known_of_a_request() -> None:
    limits = Limits(max_model_len=100, max_message_bytes=1000, max_live_requests=8, max_logprobs=5)
    for tokens, logprobs, met in [(60, None, True), (61, None, False), (60, 5, True), (60, 6, False)]:
        sampling = SamplingParams(max_tokens=tokens, logprobs=logprobs)
        assert needs(GenerateRequest(token_ids=(1,) * 40, sampling=sampling)).met_by(limits) == met
