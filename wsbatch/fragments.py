"""A bound on the fragments of one WebSocket message, counted in the byte stream: frame headers only, sans-IO."""


class TooManyFragments(Exception):
    """One message came in more fragments than `most`."""


class FragmentCounter:
    """Follows the frames of RFC 6455 section 5.2 through a client's bytes.

    The library bounds a message by its bytes. Empty fragments have none, yet each is an object that it keeps until the
    message is complete: six bytes on the wire, sixty in memory.

    Args:
        most: fragments that a message may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._fragments = 0
        self._header = bytearray()  # of the frame that has begun, while it is incomplete
        self._payload_bytes = 0  # still to come of the frame whose header is complete

    def feed(self, data: bytes | bytearray) -> None:
        """Follow what was received. Raises TooManyFragments."""
        position = 0
        while position < len(data):
            if self._payload_bytes:
                skipped = min(self._payload_bytes, len(data) - position)
                self._payload_bytes -= skipped
                position += skipped
                continue
            missing = self._header_bytes() - len(self._header)
            self._header += data[position : position + missing]
            position += missing
            # A header says how long it is in its second byte.
            if len(self._header) == self._header_bytes():
                self._begin_frame()

    def _header_bytes(self) -> int:
        if len(self._header) < 2:
            return 2
        mask_bytes = 4 if self._header[1] & 0x80 else 0
        return 2 + {126: 2, 127: 8}.get(self._header[1] & 0x7F, 0) + mask_bytes

    def _begin_frame(self) -> None:
        first, length = self._header[0], self._header[1] & 0x7F
        if length > 125:
            length = int.from_bytes(self._header[2 : 4 if length == 126 else 10], "big")
        self._payload_bytes = length
        self._header.clear()
        if first & 0x08:  # a control frame: it may stand between fragments
            return
        self._fragments = 0 if first & 0x80 else self._fragments + 1
        if self._fragments > self._most:
            raise TooManyFragments
