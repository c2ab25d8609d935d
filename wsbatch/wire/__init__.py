"""Sans-IO: bytes and text of WebSocket messages to `wsbatch.messages` and back, as msgpack and as JSON."""

from wsbatch.wire.codec import (
    CODECS,
    JSON,
    MSGPACK,
    PROTOCOL_VERSION,
    SUBPROTOCOLS,
    Codec,
    DecodeError,
    JsonCodec,
    Message,
    MsgpackCodec,
    Text,
)
from wsbatch.wire.fields import WireLimits

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
