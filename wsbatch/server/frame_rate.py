"""A bound on the frames of one connection that cost time and carry next to nothing."""

_WINDOW_S = 10.0
_MOST_CONTROL = 256
_MOST_FRAGMENTS = 16_384


class TooManyFrames(Exception):
    """More frames of one kind than a client has a use for; the message says which."""


class FrameRate:
    """Counts in windows of ten seconds. A message that ends starts no count anew: the frames have cost their time.

    No client has a use for more than a few pings a second. Fragments are how some stream a long message: 8 MiB in
    pieces of 512 bytes is at the bound.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        self._control = self._fragments = 0

    def control(self, now_s: float) -> None:
        """A ping or a pong has come. Raises TooManyFrames."""
        self._turn(now_s)
        self._control += 1
        if self._control > _MOST_CONTROL:
            raise TooManyFrames(f"more than {_MOST_CONTROL} pings and pongs in {_WINDOW_S:g} s")

    def fragment(self, now_s: float) -> None:
        """A part of a message has come that is not its last. Raises TooManyFrames."""
        self._turn(now_s)
        self._fragments += 1
        if self._fragments > _MOST_FRAGMENTS:
            raise TooManyFrames(f"more than {_MOST_FRAGMENTS} fragments in {_WINDOW_S:g} s")

    def _turn(self, now_s: float) -> None:
        if now_s >= self._began_s + _WINDOW_S:
            self._began_s, self._control, self._fragments = now_s, 0, 0
