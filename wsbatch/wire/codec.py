"""Sans-IO: the bytes and text of WebSocket messages ↔ `wsbatch.messages`. No sockets, no clock.

Two subprotocols carry the same maps: msgpack in binary messages, JSON in text messages. What a client sends is checked
in three rounds: its size, what it holds (`tally`, before anything is built), its fields (`frames`).
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from wsbatch.errors import BadRequest, RequestError, TooLarge, WsbatchError
from wsbatch.messages import ClientMessage, RequestId, ServerMessage
from wsbatch.wire.fields import WireLimits, shown
from wsbatch.wire.frames import GLANCED, ClientFrames, LongArray, client_frame, read_server_frame, server_frame
from wsbatch.wire.json_walk import JsonWalk, Malformed, load_json
from wsbatch.wire.msgpack_walk import Incomplete, MsgpackWalk, Unknown
from wsbatch.wire.tally import Pairs, Tally

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
        packed = _encoded(data)
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
        except (ValueError, RecursionError, msgpack.UnpackException, RequestError, DecodeError):
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
        """The `type`, `id` and `priority` of a frame, and perhaps others of its fields, without checking any."""

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


class MsgpackCodec(Codec):
    """One msgpack map in each binary message."""

    subprotocol = "wsbatch.v1.msgpack"
    _glance_bytes = 2**20

    # One packer for all frames: a new one would allocate its buffer each time.
    _packer = msgpack.Packer()

    def _pack(self, value: object) -> bytes:
        packed: bytes = self._packer.pack(value)
        return packed

    def _skim(self, data: Message) -> dict[object, object]:
        if isinstance(data, str | Text):
            return {}
        # The bounds are on what is built: keys and three values. What is skipped is walked over.
        unpacker = msgpack.Unpacker(
            max_buffer_size=len(data),
            max_str_len=self.limits.max_id_bytes,
            max_bin_len=0,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        unpacker.feed(data)
        frame = {}
        count = unpacker.read_map_header()
        for _ in range(count):
            key = unpacker.unpack()
            frame[key] = unpacker.unpack() if key in GLANCED else unpacker.skip()
        return frame if len(frame) == count and unpacker.tell() == len(data) else {}

    def _parts(self, frame: Mapping[str, object]) -> Iterator[bytes]:
        yield self._packer.pack_map_header(len(frame))
        for key, value in frame.items():
            yield self._pack(key)
            if isinstance(value, LongArray):
                yield self._packer.pack_array_header(len(value))
                for part in value.slices():
                    yield self._pack(part)[len(self._packer.pack_array_header(len(part))) :]
            else:
                yield self._pack(value)

    def _check_kind(self, data: Message) -> None:
        if isinstance(data, str | Text):
            raise _not_spoken(f"{self.subprotocol} is spoken in binary messages, got a text message")

    def _load(self, data: bytes | bytearray, **hooks: Any) -> object:
        try:
            # Bytes that are not UTF-8 become lone surrogates, which the string readers refuse by field.
            return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape", **hooks)
        except msgpack.StackError:
            raise _refused("the message is nested too deeply") from None
        except msgpack.OutOfData:
            raise _not_spoken("the message is not msgpack: it is incomplete") from None
        except msgpack.FormatError:
            raise _not_spoken("the message is not msgpack: it has a byte that begins no value") from None
        except msgpack.ExtraData:
            raise _not_spoken("the message is not msgpack: it goes on after its end") from None
        except (ValueError, TypeError, OverflowError) as exc:  # a timestamp, say, of a length that none has
            raise _refused(f"the message holds a value that cannot be read: {exc}") from None

    def _walk(self, data: bytes | bytearray, pairs: Pairs) -> Generator[None, None, object]:
        walk = MsgpackWalk(data, Tally(self.limits))
        try:
            yield from walk.run()
        except Incomplete:
            raise _not_spoken("the message is not msgpack: it is incomplete") from None
        except Unknown:
            raise _not_spoken("the message is not msgpack: it has a byte that begins no value") from None
        except RequestError as exc:
            raise DecodeError(exc, id=self._valid_id(walk.id())) from None
        return self._load(walk.rest, object_pairs_hook=pairs.map, ext_hook=walk.extension)


class JsonCodec(Codec):
    """The same maps as JSON, one in each text message."""

    subprotocol = "wsbatch.v1.json"
    _glance_bytes = 65_536

    _encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def _pack(self, value: object) -> str:
        return self._encoder.encode(value)

    def _skim(self, data: Message) -> dict[object, object]:
        if not isinstance(data, str | Text):
            return {}
        pairs = json.loads(_encoded(data), object_pairs_hook=tuple)
        if type(pairs) is not tuple:
            return {}
        frame = dict(pairs)
        return frame if len(frame) == len(pairs) else {}

    def _parts(self, frame: Mapping[str, object]) -> Iterator[str]:
        before = "{"
        for key, value in frame.items():
            yield f"{before}{self._pack(key)}:"
            before = ","
            if isinstance(value, LongArray):
                opening = "["
                for part in value.slices():
                    yield f"{opening}{self._pack(part)[1:-1]}"
                    opening = ","
                yield "]"
            else:
                yield self._pack(value)
        yield "}"

    def _check_kind(self, data: Message) -> None:
        if not isinstance(data, str | Text):
            raise _not_spoken(f"{self.subprotocol} is spoken in text messages, got a binary message")

    def _load(self, data: Message) -> object:
        return self._loaded(data if isinstance(data, str) else data.decode(), dict)

    def _walk(self, data: bytes | bytearray, pairs: Pairs) -> Generator[None, None, object]:
        walk = JsonWalk(data, Tally(self.limits))
        try:
            yield from walk.run()
            text = walk.rest.decode()
        except (Malformed, UnicodeDecodeError) as exc:
            raise _not_spoken(f"the message is not JSON: {exc}") from None
        except RequestError as exc:
            raise DecodeError(exc, id=self._valid_id(walk.id())) from None
        return self._loaded(text, lambda: {"object_pairs_hook": pairs.map, "parse_constant": walk.constants()})

    def _loaded(self, text: str, hooks: Callable[[], dict[str, Any]]) -> object:
        try:
            return load_json(text, hooks)
        except RecursionError:
            raise _refused("the message is nested too deeply") from None
        except ValueError as exc:
            raise _not_spoken(f"the message is not JSON: {exc}") from None


class Text(bytearray):
    """The UTF-8 of a text message, not yet decoded."""

    __slots__ = ()


def _encoded(data: bytes | bytearray | str) -> bytes | bytearray:
    if not isinstance(data, str):
        return data
    try:
        return data.encode()
    except UnicodeEncodeError as exc:
        raise _not_spoken(f"the message is not valid Unicode: {exc.reason}") from None


def _frame(value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise _refused(f"a frame must be a map, got {shown(value)}")
    return value


def _refused(message: str) -> DecodeError:
    return DecodeError(BadRequest(message))


def _joined(parts: Sequence[bytes | str]) -> bytes | str:
    return parts[0] if len(parts) == 1 else parts[0][:0].join(parts)  # type: ignore[arg-type]  # all bytes, or all str


def _not_spoken(message: str) -> DecodeError:
    return DecodeError(BadRequest(message), fatal=True)


MSGPACK = MsgpackCodec()
JSON = JsonCodec()

# By preference: the first is used where a client offers none.
CODECS: dict[str, type[Codec]] = {codec.subprotocol: codec for codec in (MsgpackCodec, JsonCodec)}
SUBPROTOCOLS = tuple(CODECS)
