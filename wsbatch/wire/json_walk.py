"""A walk over a client's JSON message: it bounds what the message holds, and decodes in pieces what is large."""

import codecs
import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from wsbatch.errors import BadRequest
from wsbatch.wire.fields import Large
from wsbatch.wire.tally import PIECE_BYTES, SHORT_BYTES, LongText, Tally
from wsbatch.wire.walk import Walk

# Possessive, so that no text whatever makes them go back: they run in linear time.
_BETWEEN = re.compile(rb'[^"\[\]{}I]*+')
_STRING = re.compile(rb'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{4}))*+', re.DOTALL)
_ESCAPE_BYTES = 6
_STEP_BYTES = 128  # what a string or a bracket takes beside its bytes, in time, is what so many bytes take
_QUOTE, _BRACKET, _CLOSING_BRACKET, _CLOSING_BRACE, _I = b'"[]}I'
_KEYS_END = re.compile(rb"[ \t\r\n]*+:")
_ID = re.compile(rb'[ \t\r\n]*+:[ \t\r\n]*+("[^"\\]{0,64}"|-?[0-9]{1,16}(?![0-9.eE]))')
_INTEGER = re.compile(rb"[ \t\r\n]*+-?[0-9]+[ \t\r\n]*+,")
_OF_IDS = b"-0123456789, \t\r\n"

# In what is left to the library, a large value stands as this constant, which is no JSON. The client's is rewritten.
_LARGE = b"-Infinity"
_SAME_NUMBER = b"-1e999"

_INTEGER_DIGITS = 600
_STRUCTURE_BYTES = 2**20
"""What a message may have outside of its strings and long arrays: white space, above all."""


def load_json(text: str, hooks: Callable[[], Mapping[str, Any]] = dict) -> Any:
    """`json.loads`, of integers of any number of digits. Raises ValueError, RecursionError.

    Args:
        hooks: makes the arguments of `json.loads`, anew where it is called again.
    """
    try:
        return json.loads(text, **hooks())
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses to convert an integer of thousands of digits. It is beyond every bound all the same when most
        # of them are left out; a hook for every integer would treble the time that ids take.
        return json.loads(text, parse_int=lambda digits: int(digits[:_INTEGER_DIGITS]), **hooks())


class Malformed(Exception):
    """No JSON; what is not found here, the library finds."""


class JsonWalk(Walk):
    """One message. `run` to its end, then `rest` is what to load, with `constants()` as its hook for constants.

    Args:
        data: the message, in UTF-8.
        tally: counts, and raises.
    """

    def __init__(self, data: bytes | bytearray, tally: Tally) -> None:
        super().__init__(data, tally)
        self._depth = 0
        self._array_at: int | None = None  # where an array began of which no entry yet is a string, map or array
        self._commas = 0  # since then
        self._structure_bytes = 0
        self._id_at: int | None = None
        self._cuts: list[int] = []  # of the string that it is in: its beginning, and the ends of its pieces

    def constants(self) -> Callable[[str], object]:
        """A hook that gives the values for which NaN, Infinity and -Infinity in `rest` stand, asked in their order."""
        large = iter(self._large)
        return lambda name: next(large) if self._in_pieces and name == _LARGE.decode() else float(name)

    def id(self) -> object:
        """The frame's id, where it has been passed: for the error of a message that was not walked to its end."""
        match = None if self._id_at is None else _ID.match(self._data, self._id_at)
        return None if match is None else json.loads(match[1].decode("utf-8", "replace"))

    def run(self) -> Iterator[None]:
        """Walk. Raises Malformed, BadRequest, TooLarge."""
        while self._at < len(self._data):
            if self._cuts:
                yield from self._string()
            else:
                yield from self._between()
            if self._done_bytes >= PIECE_BYTES:
                self._done_bytes = 0
                yield
        if self._cuts:
            raise Malformed("a string has no end")
        self._no_ids()
        self._finish()

    def _between(self) -> Iterable[None]:
        """A piece of numbers, words, commas and white space, and the string, bracket or brace that ends it, if any."""
        data, begin = self._data, self._at
        end = min(begin + PIECE_BYTES, len(data))
        self._at = at = _BETWEEN.match(data, begin, end).end()  # type: ignore[union-attr]
        self._done_bytes += at - begin + _STEP_BYTES
        self._commas += data.count(b",", begin, at)
        if self._array_at is None:
            self._structure(at - begin)
        if at == end:
            return ()
        self._at += 1
        byte = data[at]
        if byte in (_CLOSING_BRACKET, _CLOSING_BRACE):
            self._depth -= 1
            if self._depth < 0:
                raise Malformed("a bracket closes nothing")
            if (array_at := self._array_at) is not None and self._tally.is_long(self._commas + 1):
                return self._long(array_at)
            self._no_ids()
            return ()
        self._no_ids()
        if byte == _QUOTE:
            self._tally.string()
            self._cuts = [self._at]
        elif byte == _I:
            self._infinity()
        else:
            self._tally.open(self._depth)
            self._depth += 1
            self._array_at = self._at if byte == _BRACKET else None
        return ()

    def _long(self, begin: int) -> Iterable[None]:
        """An array of numbers and words alone, and of many."""
        if _INTEGER.match(self._data, begin):
            return self._ids(begin)
        self._no_ids()
        return ()

    def _structure(self, size: int) -> None:
        self._structure_bytes += size
        if self._structure_bytes > _STRUCTURE_BYTES:
            raise BadRequest(f"a message may have {_STRUCTURE_BYTES} bytes beside its strings and token ids")
        self._tally.entries(self._commas)
        self._commas = 0

    def _no_ids(self) -> None:
        """If an array seemed to hold numbers alone, it does not, or they are few."""
        if self._array_at is not None:
            size, self._array_at = self._at - self._array_at, None
            self._structure(size)

    def _infinity(self) -> None:
        self._structure(len(_LARGE))
        start = self._at - 2
        if self._data.startswith(_LARGE, start):
            self._replace(start, start + len(_LARGE), _SAME_NUMBER)

    def _ids(self, begin: int) -> Iterator[None]:
        """A long array: integers alone."""
        self._tally.ids(self._commas + 1)
        self._commas, self._array_at = 0, None
        ids = array("i")
        at, end = begin, self._at - 1
        while at <= end:
            cut = end if end - at <= PIECE_BYTES else self._data.rfind(b",", at, at + PIECE_BYTES)
            piece = self._data[at : max(cut, at)]
            if cut < 0 or piece.translate(None, _OF_IDS):
                raise self._tally.not_ids()
            try:
                values = load_json(f"[{piece.decode()}]")
            except ValueError as exc:
                raise Malformed(exc) from None
            if not values:
                raise Malformed("an entry is missing")
            self._tally.check_ids(values, len(ids))
            ids.extend(values)
            at = cut + 1
            yield
        self._cut(begin - 1, Large(ids))

    def _string(self) -> Iterable[None]:
        """A piece of a string, a key perhaps, and its end, if it is there."""
        data, begin = self._data, self._at
        end = min(begin + PIECE_BYTES, len(data))
        self._at = at = _STRING.match(data, begin, end).end()  # type: ignore[union-attr]
        self._done_bytes += at - begin + _STEP_BYTES
        self._cuts.append(at)
        if at == end:
            return ()
        if data[at] != _QUOTE:  # an escape, that the piece cuts in two, or that there is not
            if end == len(data) or end - at >= _ESCAPE_BYTES:
                raise Malformed("a string has an unknown escape")
            return ()
        self._at += 1
        cuts, self._cuts = self._cuts, []
        size = at - cuts[0]
        if (self._depth == 1 or size > SHORT_BYTES) and _KEYS_END.match(data, self._at):
            self._tally.key(size)
            if self._depth == 1:
                self._note(data[cuts[0] : at])
        elif self._in_pieces and size > SHORT_BYTES:
            return self._text(cuts)
        return ()

    def _note(self, key: bytes | bytearray) -> None:
        """A key of the frame itself tells where we are."""
        self._tally.field = key.decode("utf-8", "replace")
        if key == b"id":
            self._id_at = self._at

    def _text(self, cuts: list[int]) -> Iterator[None]:
        """A string in a message that is decoded in pieces, each between two cuts."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        long_text = LongText(self._tally)
        held = ""  # of a surrogate pair in two escapes that a cut has parted
        for begin, end in itertools.pairwise(cuts):
            try:
                text = held + decoder.decode(self._data[begin:end], end == cuts[-1])
                part = json.loads(f'"{text}"')
            except ValueError as exc:
                raise Malformed(exc) from None
            held = ""
            if part and "\ud800" <= part[-1] <= "\udbff" and end != cuts[-1]:
                held, part = text[-_ESCAPE_BYTES:], part[:-1]
            long_text.add(part)
            yield
        self._cut(cuts[0] - 1, long_text.joined())

    def _cut(self, start: int, value: Large) -> None:
        """What is left to the library has a constant instead of the value that began there and ends here."""
        if self._in_pieces:
            self._replace(start, self._at, _LARGE)
            self._large.append(value)
