"""Bytes to text without loss, and stop strings, whichever way the text arrives in pieces."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wsbatch.text.detokenize import ByteDetokenizer, StopText

BYTES = tuple(bytes([byte]) for byte in range(256))

# Few different characters, so that stop strings occur, overlap, contain each other and nearly occur.
texts = st.text("ab⏹", max_size=30)
stop_sets = st.lists(st.text("ab⏹", min_size=1, max_size=5), max_size=4).map(tuple)


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The rule itself: the shortest beginning of the text that ends with stop strings is cut before the longest."""
    for end in range(1, len(text) + 1):
        if complete := [len(stop) for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(complete)], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(bounds)] + [""]


@given(texts, stop_sets, st.lists(st.integers(0, 30)))
@example("aab", ("ab", "aab"), [1, 2])  # complete together: the longest
@example("abab", ("babb", "ba"), [2])  # complete first, inside the beginning of another
@example("aaab", ("aab",), [1, 2, 3])  # the beginning of a stop string moves on
@example("xabde", ("xabdx", "abx", "bde"), [])  # from one stop string into a third, past the second
def test_cut_before_the_first_stop_however_the_text_is_split(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    expected, stopped = reference(text, stops)
    stop_text = StopText(stops)
    sent, found = "", False
    for piece in pieces_of(text, cuts):
        safe, found = stop_text.push(piece)
        sent += safe
        assert expected.startswith(sent)
    assert found == stopped
    assert sent + stop_text.flush() == expected


@given(texts, stop_sets)
def test_holds_back_only_what_may_begin_a_stop(text: str, stops: tuple[str, ...]) -> None:
    stop_text = StopText(stops)
    sent, seen = "", ""
    for character in text:
        seen += character
        safe, found = stop_text.push(character)
        if found:
            break
        sent += safe
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        held = max((part for part in beginnings if seen.endswith(part)), key=len, default="")
        assert sent + held == seen


def test_nothing_is_sent_after_the_stop() -> None:
    stop_text = StopText(("END",))
    assert stop_text.push("one EN") == ("one ", False)
    assert stop_text.push("D two") == ("", True)
    assert stop_text.push("three") == ("", True)
    assert stop_text.flush() == ""


def test_a_stop_inside_one_piece_keeps_what_is_before_it() -> None:
    assert StopText(("\n\n",)).push("one\n\ntwo\n\n") == ("one", True)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty string"):
        StopText(("a", ""))


def test_time_is_linear_in_text_and_stop() -> None:
    """A text that is always one character short of a long stop string: backtracking would look at 2·10⁹ characters."""
    stop_text = StopText(("a" * 20_000 + "b",))
    sent = sum(len(stop_text.push("a")[0]) for _ in range(100_000))
    assert sent == 80_000
    assert stop_text.push("b") == ("", True)


@given(st.binary(max_size=40) | st.text(max_size=12).map(str.encode), st.integers(0, 255))
def test_any_bytes_come_out_as_the_whole_decoded(data: bytes, cut_character: int) -> None:
    detokenizer = ByteDetokenizer(BYTES)
    deltas = [detokenizer.push(byte) for byte in (*data, cut_character)]
    expected = (*data, cut_character)
    assert "".join(deltas) + detokenizer.flush() == bytes(expected).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_characters_come_out_whole_and_at_once(text: str) -> None:
    detokenizer = ByteDetokenizer(BYTES)
    for character in text:
        *parts, last = (detokenizer.push(byte) for byte in character.encode())
        assert not any(parts)
        assert last == character
    assert detokenizer.flush() == ""


def test_ids_outside_the_table_have_no_text() -> None:
    assert ByteDetokenizer(BYTES).push(256) == ""
