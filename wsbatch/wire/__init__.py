"""Sans-IO: bytes and text of WebSocket messages to `wsbatch.messages` and back, as msgpack and as JSON."""

from wsbatch.wire.codec import PROTOCOL_VERSION, Codec, DecodeError, Message, Text
from wsbatch.wire.fields import WireLimits
from wsbatch.wire.json_codec import JsonCodec
from wsbatch.wire.msgpack_codec import MsgpackCodec

MSGPACK = MsgpackCodec()
JSON = JsonCodec()

# By preference: the first is used where a client offers none.
CODECS: dict[str, type[Codec]] = {codec.subprotocol: codec for codec in (MsgpackCodec, JsonCodec)}
SUBPROTOCOLS = tuple(CODECS)

__all__ = [
    "CODECS",
    "JSON",
    "MSGPACK",
    "PROTOCOL_VERSION",
    "SUBPROTOCOLS",
    "Codec",
    "DecodeError",
    "JsonCodec",
    "Message",
    "MsgpackCodec",
    "Text",
    "WireLimits",
]
