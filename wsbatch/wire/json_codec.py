"""The JSON subprotocol: one map in each text message."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from wsbatch.errors import RequestError
from wsbatch.wire.codec import Codec, DecodeError, Message, Text, encoded, not_spoken, refused
from wsbatch.wire.frames import LongArray
from wsbatch.wire.json_walk import JsonWalk, Malformed, load_json
from wsbatch.wire.tally import Pairs, Tally


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
        pairs = json.loads(encoded(data), object_pairs_hook=tuple)
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
            raise not_spoken(f"{self.subprotocol} is spoken in text messages, got a binary message")

    def _load(self, data: Message) -> object:
        return self._loaded(data if isinstance(data, str) else data.decode(), dict)

    def _walk(self, data: bytes | bytearray, pairs: Pairs) -> Generator[None, None, object]:
        walk = JsonWalk(data, Tally(self.limits))
        try:
            yield from walk.run()
            text = walk.rest.decode()
        except (Malformed, UnicodeDecodeError) as exc:
            raise not_spoken(f"the message is not JSON: {exc}") from None
        except RequestError as exc:
            raise DecodeError(exc, id=self._valid_id(walk.id())) from None
        return self._loaded(text, lambda: {"object_pairs_hook": pairs.map, "parse_constant": walk.constants()})

    def _loaded(self, text: str, hooks: Callable[[], dict[str, Any]]) -> object:
        try:
            return load_json(text, hooks)
        except RecursionError:
            raise refused("the message is nested too deeply") from None
        except ValueError as exc:
            raise not_spoken(f"the message is not JSON: {exc}") from None
