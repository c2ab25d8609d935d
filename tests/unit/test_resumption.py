"""A text that one replica began and another ended is the text of one: cut anywhere, whatever is held back there."""

from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from wsbatch.batching.admission import Admission
from wsbatch.batching.fairness import NOBODY
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.engine.outbox import Outbox
from wsbatch.engine.output import Output
from wsbatch.engine.request import LiveRequest
from wsbatch.messages import ChatMessage, Finished, FinishReason, GenerateRequest, SamplingParams, Tokens
from wsbatch.text import ByteText, HuggingFaceText, TextCodec

PIECES = st.sampled_from(
    [b"a", b"b", b"ab", "\u00e9".encode(), "\u20ac".encode(), "\U0001f642".encode(), b"\x80", b"\xf0\x9f"]
)
IDS = st.lists(PIECES, min_size=1, max_size=12).map(lambda pieces: tuple(b"".join(pieces)))
STOPS = st.lists(st.sampled_from(["ab", "ba", "aba", "b\u00e9", "\U0001f642a", "\ufffd"]), max_size=2).map(tuple)


def live_request(
    request: GenerateRequest, prompt_ids: tuple[int, ...] = (1,), codec: TextCodec | None = None
) -> LiveRequest:
    scheduled = ScheduledRequest(
        key=1,
        token_ids=prompt_ids + request.resume_token_ids,
        max_new_tokens=request.sampling.most_tokens,
        sampling=SamplingParams(),
        priority=5,
        arrived_s=0.0,
    )
    return LiveRequest(
        Outbox(request),
        scheduled=scheduled,
        output=Output(request, prompt_ids, codec=codec or ByteText(), end_ids=frozenset()),
        place=Admission(max_requests=1, max_tokens=1).reserve(),
        client=NOBODY,
        wait_clock_s=0.0,
    )


def run(
    request: GenerateRequest,
    ids: tuple[int, ...],
    *,
    until: int,
    prompt_ids: tuple[int, ...] = (1,),
    codec: TextCodec | None = None,
) -> tuple[str, tuple[int, ...], Finished | None]:
    """One replica's part, as its client sees it: text, all ids so far, and the end.

    It is lost once there are `until` tokens, before it could say that the output is over; None: it is not lost.
    """
    one = live_request(request, prompt_ids, codec)
    reason = one.output.complete
    for token_id in ids[len(request.resume_token_ids) : until]:
        if reason is not None:
            break
        reason = one.advance(token_id, None, 0.0)
    text, sent = "", request.resume_token_ids
    for event in one.outbox.take():
        assert isinstance(event, Tokens)
        assert event.index == len(sent)
        text, sent = text + event.text, sent + event.token_ids
    if until <= len(ids):
        return text, sent, None
    one.reason = reason
    end = one.finished(None, hol_delay_s=0.0, now_s=0.0)
    return text + end.text, sent, end


@settings(max_examples=500)
@given(prompt_ids=IDS, ids=IDS, stops=STOPS, cuts=st.lists(st.integers(0, 48), max_size=3).map(sorted))
def test_a_cut_anywhere_changes_nothing(
    prompt_ids: tuple[int, ...], ids: tuple[int, ...], stops: tuple[str, ...], cuts: list[int]
) -> None:
    request = GenerateRequest(token_ids=prompt_ids, sampling=SamplingParams(max_tokens=len(ids), stop=stops))
    whole_text, whole_ids, whole_end = run(request, ids, until=len(ids) + 1, prompt_ids=prompt_ids)
    text, sent = "", ()
    for cut in [*(cut for cut in cuts if cut <= len(ids)), len(ids) + 1]:
        more, sent, end = run(replace(request, resume_token_ids=sent), ids, until=cut, prompt_ids=prompt_ids)
        text += more
        assert whole_text.startswith(text)
    assert (text, sent) == (whole_text, whole_ids)
    assert end is not None
    assert whole_end is not None
    assert (end.finish_reason, end.usage) == (whole_end.finish_reason, whole_end.usage)


@pytest.mark.parametrize(("resumed", "over"), [((97,), None), ((97, 98), "stop"), ((97, 97, 97), "length")])
def test_a_replica_knows_an_output_that_is_whole(resumed: tuple[int, ...], over: str | None) -> None:
    sampling = SamplingParams(max_tokens=3, stop=("ab",))
    request = GenerateRequest(prompt="x", sampling=sampling, resume_token_ids=resumed)
    assert live_request(request).output.complete == over


@pytest.fixture(scope="module")
def sentence_pieces(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceText:
    """Words that carry the space before them, which decoding takes from the first one."""
    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {token: id_ for id_, token in enumerate(["<unk>", "▁the", "▁cat", "▁a"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return HuggingFaceText(directory)


@pytest.mark.parametrize("resumed", range(3))
@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (GenerateRequest(prompt="the cat"), " a cat"),
        (GenerateRequest(token_ids=(1, 2)), " a cat"),
        (GenerateRequest(messages=(ChatMessage("user", "the cat"),)), "a cat"),
    ],
    ids=["prompt", "token_ids", "messages"],
)
def test_a_prompts_text_goes_on_and_an_answer_begins_a_text(
    sentence_pieces: HuggingFaceText, request_: GenerateRequest, text: str, resumed: int
) -> None:
    prompt_ids = (1, 2)
    request = replace(request_, sampling=SamplingParams(max_tokens=2))
    begun, sent, _ = run(request, (3, 2), until=resumed, prompt_ids=prompt_ids, codec=sentence_pieces)
    resuming = replace(request, resume_token_ids=sent)
    rest, _, _ = run(resuming, (3, 2), until=3, prompt_ids=prompt_ids, codec=sentence_pieces)
    assert begun + rest == text


@pytest.mark.parametrize(
    ("stop", "reason", "told", "text"),
    [
        ("\ufffd", "length", "stop", "a"),
        ("a\ufffd", "length", "stop", ""),
        ("\ufffd\ufffd", "length", "length", "a\ufffd"),
        ("\ufffd", "cancelled", "cancelled", "a"),
        ("\ufffd", "timeout", "timeout", "a"),
    ],
)
def test_a_stop_string_in_the_text_that_comes_free_last(stop: str, reason: FinishReason, told: str, text: str) -> None:
    """Half a character becomes U+FFFD only where the output ends with it."""
    request = GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=3, stop=(stop,)), stream=False)
    one = live_request(request)
    for token_id in b"a\xf0\x9f":
        one.reason = one.advance(token_id, None, 0.0)
    assert one.reason == "length"
    one.reason = reason
    end = one.finished(None, hol_delay_s=0.0, now_s=0.0)
    assert (end.finish_reason, end.text, end.token_ids) == (told, text, (0x61, 0xF0, 0x9F))
