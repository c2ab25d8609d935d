"""The msgpack subprotocol: one map in each binary message."""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]

from wsbatch.errors import RequestError
from wsbatch.wire.codec import Codec, DecodeError, Message, Text, not_spoken, refused
from wsbatch.wire.frames import GLANCED, LongArray
from wsbatch.wire.msgpack_walk import Incomplete, MsgpackWalk, Unknown
from wsbatch.wire.tally import Pairs, Tally


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
        frame = {}
        try:
            unpacker.feed(data)
            count = unpacker.read_map_header()
            for _ in range(count):
                key = unpacker.unpack()
                frame[key] = unpacker.unpack() if key in GLANCED else unpacker.skip()
        except msgpack.UnpackException as exc:
            raise ValueError(exc) from None
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
            raise not_spoken(f"{self.subprotocol} is spoken in binary messages, got a text message")

    def _load(self, data: bytes | bytearray, **hooks: Any) -> object:
        try:
            # Bytes that are not UTF-8 become lone surrogates, which the string readers refuse by field.
            return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogateescape", **hooks)
        except msgpack.StackError:
            raise refused("the message is nested too deeply") from None
        except msgpack.OutOfData:
            raise not_spoken("the message is not msgpack: it is incomplete") from None
        except msgpack.FormatError:
            raise not_spoken("the message is not msgpack: it has a byte that begins no value") from None
        except msgpack.ExtraData:
            raise not_spoken("the message is not msgpack: it goes on after its end") from None
        except (ValueError, TypeError, OverflowError) as exc:  # a timestamp, say, of a length that none has
            raise refused(f"the message holds a value that cannot be read: {exc}") from None

    def _walk(self, data: bytes | bytearray, pairs: Pairs) -> Generator[None, None, object]:
        walk = MsgpackWalk(data, Tally(self.limits))
        try:
            yield from walk.run()
        except Incomplete:
            raise not_spoken("the message is not msgpack: it is incomplete") from None
        except Unknown:
            raise not_spoken("the message is not msgpack: it has a byte that begins no value") from None
        except RequestError as exc:
            raise DecodeError(exc, id=self._valid_id(walk.id())) from None
        return self._load(walk.rest, object_pairs_hook=pairs.map, ext_hook=walk.extension)
