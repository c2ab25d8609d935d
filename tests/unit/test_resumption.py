"""A text that one replica began and another ended is the text of one: cut anywhere, whatever is held back there."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.generation import Generation
from wsbatch.messages import Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.stream import Stream
from wsbatch.text import ByteText

PIECES = st.sampled_from(
    [b"a", b"b", b"ab", "\u00e9".encode(), "\u20ac".encode(), "\U0001f642".encode(), b"\x80", b"\xf0\x9f"]
)
IDS = st.lists(PIECES, min_size=1, max_size=12).map(lambda pieces: tuple(b"".join(pieces)))
STOPS = st.lists(st.sampled_from(["ab", "ba", "aba", "b\u00e9", "\U0001f642a", "\ufffd"]), max_size=2).map(tuple)


def generation(request: GenerateRequest) -> Generation:
    stream = Stream(request, on_cancel=lambda _: None)
    return Generation(1, stream, client=None, prompt_ids=[1], codec=ByteText(), end_ids=frozenset(), arrived_s=0.0)


def run(request: GenerateRequest, ids: tuple[int, ...], *, until: int) -> tuple[str, tuple[int, ...], Finished | None]:
    """One replica's part, as its client sees it: text, all ids so far, and the end.

    It is lost once there are `until` tokens, before it could say that the output is over; None: it is not lost.
    """
    one = generation(request)
    reason = one.ended_elsewhere
    for token_id in ids[len(request.resume_token_ids) : until]:
        if reason is not None:
            break
        reason = one.advance(token_id, None, 0.0)
    text, sent = "", request.resume_token_ids
    for event in one.stream.take():
        assert isinstance(event, Tokens)
        assert event.index == len(sent)
        text, sent = text + event.text, sent + event.token_ids
    if until <= len(ids):
        return text, sent, None
    one.reason = reason
    end = one.finished(None, hol_delay_s=0.0, now_s=0.0)
    return text + end.text, sent, end


@settings(max_examples=500)
@given(ids=IDS, stops=STOPS, cuts=st.lists(st.integers(0, 48), max_size=3).map(sorted))
def test_a_cut_anywhere_changes_nothing(ids: tuple[int, ...], stops: tuple[str, ...], cuts: list[int]) -> None:
    request = GenerateRequest(prompt="x", sampling=SamplingParams(max_tokens=len(ids), stop=stops))
    whole_text, whole_ids, whole_end = run(request, ids, until=len(ids) + 1)
    text, sent = "", ()
    for cut in [*(cut for cut in cuts if cut <= len(ids)), len(ids) + 1]:
        more, sent, end = run(replace(request, resume_token_ids=sent), ids, until=cut)
        text += more
        assert whole_text.startswith(text)
    assert (text, sent) == (whole_text, whole_ids)
    assert end is not None
    assert whole_end is not None
    assert (end.finish_reason, end.usage) == (whole_end.finish_reason, whole_end.usage)


@pytest.mark.parametrize(("resumed", "over"), [((97,), None), ((97, 98), "stop"), ((97, 97, 97), "length")])
def test_a_replica_knows_an_output_that_is_whole(resumed: tuple[int, ...], over: str | None) -> None:
    sampling = SamplingParams(max_tokens=3, stop=("ab",))
    assert generation(GenerateRequest(prompt="x", sampling=sampling, resume_token_ids=resumed)).ended_elsewhere == over
