"""Counting the fragments of a message."""

import itertools
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wsproto.frame_protocol import Opcode

from wsbatch.fragments import FragmentCounter, TooManyFragments


def frame(opcode: Opcode, payload: bytes, *, final: bool) -> bytes:
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = struct.pack("!BH", 0x80 | 126, size) if size < 65_536 else struct.pack("!BQ", 0x80 | 127, size)
    # Masked with zeros, so that a payload of zeros, read as frames by mistake, is empty fragments.
    return bytes([0x80 * final | opcode]) + length + b"\0\0\0\0" + payload


EMPTY = frame(Opcode.CONTINUATION, b"", final=False)


def test_fragments_are_counted_to_the_bound() -> None:
    counter = FragmentCounter(3)
    counter.feed(frame(Opcode.BINARY, b"", final=False) + EMPTY * 2)
    with pytest.raises(TooManyFragments):
        counter.feed(EMPTY)


def test_a_message_that_ends_is_forgotten() -> None:
    counter = FragmentCounter(3)
    message = frame(Opcode.TEXT, b"a", final=False) + EMPTY * 2 + frame(Opcode.CONTINUATION, b"b", final=True)
    counter.feed(message * 100)
    counter.feed(frame(Opcode.BINARY, b"x" * 70_000, final=True) * 3)


def test_control_frames_between_fragments_neither_count_nor_end() -> None:
    counter = FragmentCounter(3)
    with pytest.raises(TooManyFragments):
        counter.feed((frame(Opcode.PING, b"p", final=True) + EMPTY) * 4)


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for size in itertools.cycle(cuts):
        if not data:
            return pieces
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def feed_all(counter: FragmentCounter, pieces: list[bytes]) -> None:
    for piece in pieces:
        counter.feed(piece)


lengths = st.sampled_from([0, 1, 125, 126, 127, 400])
fragments = st.tuples(st.sampled_from([Opcode.BINARY, Opcode.CONTINUATION, Opcode.PING]), lengths, st.booleans())


@given(st.lists(fragments, max_size=10), st.lists(st.integers(1, 300), min_size=1, max_size=8))
@example([(Opcode.BINARY, 70_000, False), (Opcode.BINARY, 0, False)], [40_000])
@settings(deadline=None)
def test_the_count_is_right_however_the_bytes_are_cut(frames: list[tuple[Opcode, int, bool]], cuts: list[int]) -> None:
    data, count, most = b"", 0, 0
    for opcode, length, final in frames:
        if opcode is Opcode.PING:
            data += frame(opcode, b"\x00" * min(length, 125), final=True)
        else:
            data += frame(opcode, b"\x00" * length, final=final)
            count = 0 if final else count + 1
            most = max(most, count)
    feed_all(FragmentCounter(most), cut_up(data, cuts))
    if most:
        with pytest.raises(TooManyFragments):
            feed_all(FragmentCounter(most - 1), cut_up(data, cuts))
