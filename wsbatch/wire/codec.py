"""Sans-IO: the bytes and text of WebSocket messages ↔ `wsbatch.messages`. No sockets, no clock.

Two subprotocols carry the same maps: msgpack in binary messages (`msgpack_codec`), JSON in text messages
(`json_codec`). What a client sends is checked in three rounds: its size, what it holds (`tally`, before anything is
built), its fields (`frames`).
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from wsbatch.errors import BadRequest, RequestError, TooLarge, WsbatchError
from wsbatch.messages import ClientMessage, RequestId, ServerMessage
from wsbatch.wire.fields import WireLimits, shown
from wsbatch.wire.frames import ClientFrames, LongArray, client_frame, read_server_frame, server_frame
from wsbatch.wire.tally import Pairs

PROTOCOL_VERSION = 1

Message: TypeAlias = bytes | bytearray | str
"""As it was received: the bytes of a binary one; a string, or `Text`, of a text one."""

_PIECE_BYTES = 32_768


class DecodeError(WsbatchError):
    """A message that could not be decoded.

    Attributes:
        error: what to tell the sender; a BadRequest or a TooLarge.
        id: the request it was about, where that could be read.
        fatal: whether the connection must close, with `error.close_code`: the message was not in the subprotocol's
            syntax at all, so the sender is not speaking it. After any other error the connection goes on.
    """

    def __init__(self, error: RequestError, *, id: RequestId | None = None, fatal: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.id = id
        self.fatal = fatal


class Codec(ABC):
    """One subprotocol. Instances keep no state between calls and may serve any number of connections.

    Args:
        limits: bounds on what `decode_client` accepts.
    """

    subprotocol: str
    _glance_bytes: int  # a longer message takes more than some milliseconds even so, at its worst

    def __init__(self, limits: WireLimits | None = None) -> None:
        self.limits = limits if limits is not None else WireLimits()
        self._frames = ClientFrames(self.limits)

    def decode_client(self, data: Message) -> ClientMessage:
        """The message a client sent. Raises DecodeError and nothing else, whatever `data` is."""
        steps = self.decoding(data)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                message: ClientMessage = done.value
                return message

    def decoding(self, data: Message) -> Generator[None, None, ClientMessage]:
        """`decode_client` in steps of a millisecond or so: the last one returns the message.

        Text may come as a string or as `Text`.
        """
        self._check_kind(data)
        packed = encoded(data)
        if len(packed) > self.limits.max_message_bytes:
            error = TooLarge(f"a message may have {self.limits.max_message_bytes} bytes, got {len(packed)}")
            raise DecodeError(error, fatal=True)
        pairs = Pairs()
        frame = _frame((yield from self._walk(packed, pairs)))
        try:
            if pairs.problem is not None:
                raise BadRequest(pairs.problem)
            return self._frames.read(frame)
        except RequestError as exc:
            raise DecodeError(exc, id=self._id_of(frame)) from None

    def glance(self, data: Message) -> tuple[RequestId, int] | None:
        """The id and the priority of a `generate`, of which nothing else is read: enough to refuse it.

        It takes a small part of the time that decoding takes. The rest of the frame may be wrong. None where only
        decoding can tell what the message is.
        """
        try:
            frame = self._skim(data) if len(data) <= self._glance_bytes else {}
            if frame.get("type") == "generate":
                return self._frames.read_glance(frame)
        except (ValueError, TypeError, RecursionError, RequestError, DecodeError):
            pass
        return None

    def decode_server(self, data: Message) -> ServerMessage | None:
        """The message a server sent; None for a type newer than this version. Raises DecodeError."""
        self._check_kind(data)
        frame = _frame(self._load(data))
        try:
            return read_server_frame(frame)
        except RequestError as exc:
            raise DecodeError(exc, id=self._id_of(frame)) from None

    def encode_client(self, message: ClientMessage) -> bytes | str:
        """Raises BadRequest for a value that has no form on the wire (a lone surrogate, a NaN, an object)."""
        try:
            data = self._pack(client_frame(message))
            if isinstance(data, str):
                data.encode()
        except (TypeError, ValueError, OverflowError) as exc:
            raise BadRequest(f"the request cannot be encoded: {exc}") from exc
        return data

    def encode_server(self, message: ServerMessage) -> bytes | str:
        """One frame: bytes for a binary message, str for a text message."""
        return _joined(list(self.encoding(message)))

    def encoding(self, message: ServerMessage) -> Iterator[bytes | str]:
        """`encode_server` in pieces, each made in a millisecond or so: one piece, unless the output is long."""
        frame = server_frame(message)
        if not any(type(value) is LongArray for value in frame.values()):
            yield self._pack(frame)
            return
        parts: list[bytes | str] = []
        size = 0
        for part in self._parts(frame):
            parts.append(part)
            size += len(part)
            if size >= _PIECE_BYTES:
                yield _joined(parts)
                parts, size = [], 0
        if parts:
            yield _joined(parts)

    @abstractmethod
    def _pack(self, value: object) -> bytes | str: ...

    @abstractmethod
    def _parts(self, frame: Mapping[str, object]) -> Iterator[bytes | str]:
        """What `_pack` would make of a frame with long arrays."""

    @abstractmethod
    def _skim(self, data: Message) -> dict[object, object]:
        """The `type`, `id` and `priority` of a frame, and perhaps others of its fields, without checking any.

        Raises ValueError, RecursionError, DecodeError.
        """

    @abstractmethod
    def _check_kind(self, data: Message) -> None:
        """Raises DecodeError for a text message where binary ones are spoken, and the other way round."""

    @abstractmethod
    def _load(self, data: Any) -> object: ...

    @abstractmethod
    def _walk(self, data: bytes | bytearray, pairs: Pairs) -> Generator[None, None, object]:
        """A client's message, bounded before it is decoded. Raises DecodeError."""

    def _id_of(self, frame: Mapping[str, object]) -> RequestId | None:
        return self._valid_id(frame.get("id"))

    def _valid_id(self, value: object) -> RequestId | None:
        try:
            found: RequestId = self._frames.read_id("id", value)
        except RequestError:
            return None
        return found


class Text(bytearray):
    """The UTF-8 of a text message, not yet decoded."""

    __slots__ = ()


def encoded(data: Message) -> bytes | bytearray:
    """The message in bytes. Raises DecodeError where it is not valid Unicode."""
    if not isinstance(data, str):
        return data
    try:
        return data.encode()
    except UnicodeEncodeError as exc:
        raise not_spoken(f"the message is not valid Unicode: {exc.reason}") from None


def refused(message: str) -> DecodeError:
    """The error of a message whose content is wrong; the connection goes on."""
    return DecodeError(BadRequest(message))


def not_spoken(message: str) -> DecodeError:
    """The error of a message that is not in the subprotocol's syntax at all."""
    return DecodeError(BadRequest(message), fatal=True)


def _frame(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise refused(f"a frame must be a map, got {shown(value)}")
    return value


def _joined(parts: Sequence[bytes | str]) -> bytes | str:
    return parts[0] if len(parts) == 1 else parts[0][:0].join(parts)  # type: ignore[arg-type]  # all bytes, or all str
