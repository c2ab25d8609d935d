"""Sans-IO: the bytes and text of WebSocket messages ↔ `wsbatch.messages`. No sockets, no clock.

Two subprotocols carry the same maps: msgpack in binary messages, JSON in text messages. What a client sends is checked
in three rounds: its size, its syntax (with a bound on what decoding may allocate), its fields (`frames`).
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]

from wsbatch.errors import BadRequest, RequestError, TooLarge, WsbatchError
from wsbatch.messages import ClientMessage, RequestId, ServerMessage
from wsbatch.wire.fields import WireLimits, shown
from wsbatch.wire.frames import ClientFrames, client_frame, read_server_frame, server_frame

PROTOCOL_VERSION = 1

_INTEGER_DIGITS = 600


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

    def __init__(self, limits: WireLimits | None = None) -> None:
        self.limits = limits if limits is not None else WireLimits()
        self._frames = ClientFrames(self.limits)

    def decode_client(self, data: bytes | str) -> ClientMessage:
        """The message a client sent. Raises DecodeError and nothing else, whatever `data` is."""
        containers = _Containers(self.limits.max_containers)
        frame = self._parse(data, containers)
        try:
            if containers.problem is not None:
                raise BadRequest(containers.problem)
            return self._frames.read(frame)
        except RequestError as exc:
            raise DecodeError(exc, id=self._id_of(frame)) from None

    def decode_server(self, data: bytes | str) -> ServerMessage | None:
        """The message a server sent; None for a type newer than this version. Raises DecodeError."""
        frame = self._parse(data, None)
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
        return self._pack(server_frame(message))

    @abstractmethod
    def _pack(self, frame: Mapping[str, object]) -> bytes | str: ...

    @abstractmethod
    def _decode(self, data: Any, containers: "_Containers | None") -> object: ...

    def _parse(self, data: bytes | str, containers: "_Containers | None") -> dict[str, object]:
        try:
            value = self._decode(data, containers)
        except RequestError as exc:
            raise DecodeError(exc) from None
        if type(value) is not dict:
            raise DecodeError(BadRequest(f"a frame must be a map, got {shown(value)}"))
        return value

    def _id_of(self, frame: Mapping[str, object]) -> RequestId | None:
        try:
            found: RequestId = self._frames.read_id("id", frame.get("id"))
        except RequestError:
            return None
        return found

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_message_bytes:
            error = TooLarge(f"a message may have {self.limits.max_message_bytes} bytes, got {size}")
            raise DecodeError(error, fatal=True)


class MsgpackCodec(Codec):
    """One msgpack map in each binary message."""

    subprotocol = "wsbatch.v1.msgpack"

    # One packer for all frames: a new one would allocate its buffer each time.
    _packer = msgpack.Packer()

    def _pack(self, frame: Mapping[str, object]) -> bytes:
        packed: bytes = self._packer.pack(frame)
        return packed

    def _decode(self, data: bytes | str, containers: "_Containers | None") -> object:
        if isinstance(data, str):
            raise _not_spoken(f"{self.subprotocol} is spoken in binary messages, got a text message")
        # Bytes that are not UTF-8 become lone surrogates, which the string readers refuse by field.
        options: dict[str, Any] = {"strict_map_key": False, "unicode_errors": "surrogateescape"}
        try:
            if containers is None:
                return msgpack.unpackb(data, **options)
            self._check_size(len(data))
            # An array's header claims a length that is allocated before its items are read. Walking over the message
            # first, which allocates nothing, shows that every length claimed is there.
            scanner = msgpack.Unpacker(max_buffer_size=len(data))
            scanner.feed(data)
            scanner.skip()
            return msgpack.unpackb(data, object_pairs_hook=containers.map, list_hook=containers.array, **options)
        except msgpack.StackError:
            raise BadRequest("the message is nested too deeply") from None
        except msgpack.OutOfData:
            raise _not_spoken("the message is not msgpack: it is incomplete") from None
        except msgpack.FormatError:
            raise _not_spoken("the message is not msgpack: it has a byte that begins no value") from None
        except msgpack.ExtraData:
            raise _not_spoken("the message is not msgpack: it goes on after its end") from None
        except (ValueError, TypeError, OverflowError) as exc:  # a timestamp, say, of a length that none has
            raise BadRequest(f"the message holds a value that cannot be read: {exc}") from None


class JsonCodec(Codec):
    """The same maps as JSON, one in each text message."""

    subprotocol = "wsbatch.v1.json"

    _encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Possessive, and with an optional end, so that no text whatever makes it go back: it runs in linear time.
    _string = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

    def _pack(self, frame: Mapping[str, object]) -> str:
        return self._encoder.encode(frame)

    def _decode(self, data: bytes | str, containers: "_Containers | None") -> object:
        if not isinstance(data, str):
            raise _not_spoken(f"{self.subprotocol} is spoken in text messages, got a binary message")
        try:
            if containers is None:
                return _json_value(data)
            self._check_size(len(data.encode()))
            # json calls nothing back for an array, so arrays are counted here; brackets in strings are not arrays.
            if (brackets := data.count("[")) > containers.left:
                brackets = self._string.sub("", data).count("[")
            containers.take(brackets)
            return _json_value(data, containers)
        except RecursionError:
            raise BadRequest("the message is nested too deeply") from None
        except ValueError as exc:
            raise _not_spoken(f"the message is not JSON: {exc}") from None


def _json_value(text: str, containers: "_Containers | None" = None) -> object:
    hooks: dict[str, Any] = {} if containers is None else {"object_pairs_hook": containers.map}
    left = 0 if containers is None else containers.left
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # Python refuses to convert an integer of thousands of digits. It is beyond every bound all the same when most
        # of them are left out; a hook for every integer would treble the time that ids take.
        if containers is not None:
            containers.left = left
        return json.loads(text, parse_int=lambda digits: int(digits[:_INTEGER_DIGITS]), **hooks)


class _Containers:
    """Hooks of both parsers: bounds the containers of a message, and notes keys that are not strings or come twice."""

    def __init__(self, most: int) -> None:
        self.left = most
        self.problem: str | None = None
        self._most = most

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise BadRequest(f"a message may have {self._most} maps and arrays")

    def array(self, items: list[object]) -> list[object]:
        self.take(1)
        return items

    def map(self, pairs: list[tuple[object, object]]) -> dict[str, object]:
        self.take(1)
        values: dict[str, object] = {}
        for key, value in pairs:
            if type(key) is not str:
                self.problem = f"the keys of a map must be strings, got {shown(key)}"
            elif key in values:
                self.problem = f"{shown(key)}: is there twice"
                values[key] = None  # which of the two was meant is unknown, above all for an id
            else:
                values[key] = value
        return values


def _not_spoken(message: str) -> DecodeError:
    return DecodeError(BadRequest(message), fatal=True)


MSGPACK = MsgpackCodec()
JSON = JsonCodec()

# By preference: the first is used where a client offers none.
CODECS: dict[str, type[Codec]] = {codec.subprotocol: codec for codec in (MsgpackCodec, JsonCodec)}
SUBPROTOCOLS = tuple(CODECS)
