"""What the walks over a message have in common: where they are, and what they leave to the library."""

from wsbatch.wire.fields import Large
from wsbatch.wire.tally import PIECE_BYTES, Tally


class Walk:
    """A walk over one message. At its end, `rest` is what to load: the message, with placeholders for what is large.

    Args:
        data: the message.
        tally: counts, and raises.
    """

    def __init__(self, data: bytes | bytearray, tally: Tally) -> None:
        self.rest = data
        self._data = data
        self._tally = tally
        self._in_pieces = len(data) > PIECE_BYTES
        self._at = 0
        self._done_bytes = 0  # since the last yield
        self._large: list[Large] = []  # the values for which the placeholders stand, in order
        self._parts: list[bytes | bytearray] = []  # of `rest`
        self._kept = 0  # up to here the message is in `_parts`

    def _replace(self, start: int, end: int, placeholder: bytes) -> None:
        """What is left to the library has this instead of the bytes from `start` to `end`."""
        if self._in_pieces:
            self._parts += (self._data[self._kept : start], placeholder)
            self._kept = end

    def _finish(self) -> None:
        """The walk is over: put `rest` together."""
        if self._parts:
            self.rest = b"".join(self._parts) + self._data[self._kept :]
