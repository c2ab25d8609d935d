"""A walk over a client's msgpack message: it bounds what the message holds, and decodes in pieces what is large.

https://github.com/msgpack/msgpack/blob/master/spec.md has the first bytes of every type.
"""

import codecs
from array import array
from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]

from wsbatch.wire.fields import Large
from wsbatch.wire.tally import PIECE_BYTES, PIECE_ENTRIES, SHORT_BYTES, LongText, Tally
from wsbatch.wire.walk import Walk

# By first byte: the bytes of a value whose size that byte tells.
_FIXED = bytes(
    [1] * 0x80  # positive fixint
    + [0] * 0x20  # fixmap, fixarray
    + [1 + size for size in range(0x20)]  # fixstr
    + [1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 5, 9]  # nil, never used, false, true, bin and ext, float
    + [2, 3, 5, 9, 2, 3, 5, 9]  # uint, int
    + [3, 4, 6, 10, 18]  # fixext
    + [0] * 7  # str, array, map
    + [1] * 0x20  # negative fixint
)
_NO_INTEGER = 1 << 62
_INTEGER = [
    _FIXED[first] if first < 0x80 or 0xCC <= first <= 0xD3 or first >= 0xE0 else _NO_INTEGER for first in range(256)
]
# The bytes of the length that follows the first byte: of bin, ext, str, array, map.
_LENGTH_BYTES = dict(zip(range(0xC4, 0xCA), (1, 2, 4, 1, 2, 4), strict=True))
_LENGTH_BYTES |= zip(range(0xD9, 0xE0), (1, 2, 4, 2, 4, 2, 4), strict=True)
_BINS, _EXTENSIONS = (0xC4, 0xC5, 0xC6), (0xC7, 0xC8, 0xC9)
_STRINGS, _MAPS, _ARRAYS = (0xD9, 0xDA, 0xDB), (0xDE, 0xDF), (0xDC, 0xDD)
_EMPTY_BIN = b"\xc4\x00"
# In what is left to the library, a large value stands as an extension of this type with its number. No extension of
# the client's own is left there.
_LARGE_TYPE, _CLIENTS_EXTENSION = 0, b"\xd4\x01\x00"


class Incomplete(Exception):
    """The message ends before its values do."""


class Unknown(Exception):
    """A byte that begins nothing, or one too many."""


class MsgpackWalk(Walk):
    """One message. `run` to its end, then `rest` is what to unpack, with `extension` as its hook for extensions.

    Args:
        data: the message.
        tally: counts, and raises.
    """

    def __init__(self, data: bytes | bytearray, tally: Tally) -> None:
        super().__init__(data, tally)
        self._left = 1  # values to come in the innermost map or array; a map's keys are values too
        self._outer: list[int] = []
        self._is_map: list[bool] = [False]
        self._id: tuple[int, int] | None = None

    def extension(self, kind: int, payload: bytes) -> object:
        """The value that an extension in `rest` stands for."""
        if self._in_pieces and kind == _LARGE_TYPE:
            return self._large[int.from_bytes(payload, "big")]
        return msgpack.ExtType(kind, payload)

    def id(self) -> object:
        """The frame's id, where it has been passed: for the error of a message that was not walked to its end."""
        return None if self._id is None else msgpack.unpackb(self._data[slice(*self._id)], unicode_errors="replace")

    def run(self) -> Iterator[None]:
        """Walk. Raises Incomplete, Unknown, BadRequest, TooLarge."""
        data, steps = self._data, 0
        try:
            while self._left or self._outer:
                if not self._left:
                    self._left = self._outer.pop()
                    self._is_map.pop()
                    continue
                is_key = self._is_map[-1] and self._left % 2 == 0
                self._left -= 1
                start, first = self._at, data[self._at]
                if size := _FIXED[first]:
                    self._at += size
                    if 0xD4 <= first <= 0xD8:
                        self._replace(start, self._at, _CLIENTS_EXTENSION)
                    elif len(self._outer) == 1:
                        self._note(start, first, is_key)
                else:
                    yield from self._sized(first, is_key)
                if (steps := steps + 1) % PIECE_ENTRIES == 0:
                    yield
        except IndexError:
            raise Incomplete from None
        if self._at != len(data):
            raise Incomplete if self._at > len(data) else Unknown
        self._finish()

    def _note(self, start: int, first: int, is_key: bool) -> None:
        """A value of the frame itself: a key tells where we are."""
        if is_key:
            name = self._data[start + 1 : self._at] if 0xA0 <= first <= 0xBF else b""
            self._tally.field = name.decode("ascii", "replace")
        elif self._tally.field == "id":
            self._id = (start, self._at)

    def _sized(self, first: int, is_key: bool) -> Iterator[None]:
        """A value whose length stands in the message."""
        start = self._at
        if 0x80 <= first <= 0x9F:
            self._at += 1
            yield from self._container(first < 0x90, first & 0x0F, start)
            return
        if first not in _LENGTH_BYTES:
            raise Unknown
        length_bytes = _LENGTH_BYTES[first]
        self._at += 1 + length_bytes + (first in _EXTENSIONS)
        if self._at > len(self._data):
            raise Incomplete
        length = int.from_bytes(self._data[start + 1 : start + 1 + length_bytes], "big")
        if first in _MAPS or first in _ARRAYS:
            yield from self._container(first in _MAPS, length, start)
            return
        begin, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise Incomplete
        if first not in _STRINGS:
            self._replace(start, self._at, _EMPTY_BIN if first in _BINS else _CLIENTS_EXTENSION)
            return
        if is_key:
            self._tally.key(length)
        if len(self._outer) == 1:
            self._note(start, first, is_key)
        if self._in_pieces and length > SHORT_BYTES:
            yield from self._text(start, begin)

    def _container(self, is_map: bool, count: int, start: int) -> Iterator[None]:
        self._tally.open(len(self._outer))
        if not is_map and self._tally.is_long(count) and _INTEGER[self._data[self._at]] < _NO_INTEGER:
            yield from self._ids(start, count)
            return
        self._tally.entries(max(0, count - 1))
        self._outer.append(self._left)
        self._is_map.append(is_map)
        self._left = 2 * count if is_map else count

    def _ids(self, start: int, count: int) -> Iterator[None]:
        """A long array: integers alone."""
        self._tally.ids(count)
        data = self._data
        ids = array("i")
        while len(ids) < count:
            begin, piece = self._at, min(PIECE_ENTRIES, count - len(ids))
            at = begin
            for _ in range(piece):
                at += _INTEGER[data[at]]
                if at >= _NO_INTEGER:
                    raise self._tally.not_ids()
            if at > len(data):
                raise Incomplete
            self._at = at
            values = msgpack.unpackb(b"\xdc" + piece.to_bytes(2, "big") + data[begin:at])
            self._tally.check_ids(values, len(ids))
            ids.extend(values)
            yield
        self._cut_large(start, Large(ids))

    def _text(self, start: int, begin: int) -> Iterator[None]:
        """A text in a message that is decoded in pieces."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        text = LongText(self._tally)
        for at in range(begin, self._at, PIECE_BYTES):
            end = min(at + PIECE_BYTES, self._at)
            try:
                text.add(decoder.decode(self._data[at:end], end == self._at))
            except UnicodeDecodeError:
                raise self._tally.wrong("a text is not valid Unicode") from None
            self._done_bytes += end - at
            if self._done_bytes >= PIECE_BYTES:
                self._done_bytes = 0
                yield
        self._cut_large(start, text.joined())

    def _cut_large(self, start: int, value: Large) -> None:
        if self._in_pieces:
            self._replace(start, self._at, b"\xd6" + bytes([_LARGE_TYPE]) + len(self._large).to_bytes(4, "big"))
            self._large.append(value)
