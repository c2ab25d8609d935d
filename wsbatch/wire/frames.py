"""Frames: the maps on the wire ↔ the messages of `wsbatch.messages`. Which fields there are, and who reads them.

A frame is a map with a `type`. Defaults live in the messages alone: a reader runs only for a field that is there and
not null. docs/protocol.md describes the same tables in words.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

from wsbatch.errors import BadRequest
from wsbatch.messages import (
    DEFAULT_PRIORITY,
    LEAST_URGENT,
    Accepted,
    BatchReport,
    BatchSnapshot,
    BatchStep,
    Cancel,
    ClientMessage,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    GetStatus,
    Hello,
    Limits,
    Ping,
    Pong,
    RequestId,
    ServerMessage,
    Started,
    Status,
    Timing,
    TokenLogprobs,
    Tokens,
    Unwatch,
    Usage,
    Watch,
)
from wsbatch.wire.fields import (
    MAX_SAFE_INTEGER,
    Reader,
    WireLimits,
    array,
    batch_row,
    boolean,
    identifier,
    integer,
    number,
    read_fields,
    shown,
    string,
    token_ids,
    token_logprobs,
    wrong_type,
)
from wsbatch.wire.generate import GenerateFields

# What stands on the wire for a log probability of minus infinity: JSON has no infinities.
LOGPROB_FLOOR = -9999.0

# What is encoded in a millisecond or so.
_SLICE_LOGPROBS = 128
_SLICE_IDS = 4096

GLANCED = ("type", "id", "priority")
"""The fields that tell how to refuse a `generate`."""

_CLIENT_TYPES: dict[type[ClientMessage], str] = {
    GenerateRequest: "generate",
    Cancel: "cancel",
    Ping: "ping",
    GetStatus: "get_status",
    Watch: "watch",
    Unwatch: "unwatch",
}


class ClientFrames:
    """Maps from a client → messages, within `limits`."""

    def __init__(self, limits: WireLimits) -> None:
        self.read_id = identifier(limits.max_id_bytes)
        self._read_priority = integer(0, LEAST_URGENT)
        self._nonce = {"nonce": self.read_id}
        self._by_type: dict[str, Callable[[Mapping[str, object]], ClientMessage]] = {
            "generate": GenerateFields(limits).read,
            "cancel": lambda frame: Cancel(**read_fields(frame, {"id": self.read_id}, required=("id",))),
            "ping": lambda frame: Ping(**read_fields(frame, self._nonce, required=("nonce",))),
            "get_status": lambda frame: GetStatus(),
            "watch": lambda frame: Watch(),
            "unwatch": lambda frame: Unwatch(),
        }

    def read_glance(self, frame: Mapping[Any, object]) -> tuple[RequestId, int]:
        """The id and the priority of a `generate`. Raises BadRequest where either is wrong."""
        priority = frame.get("priority")
        read = DEFAULT_PRIORITY if priority is None else self._read_priority("priority", priority)
        return self.read_id("id", frame.get("id")), read

    def read(self, frame: Mapping[str, object]) -> ClientMessage:
        """The message in one frame. Raises BadRequest or TooLarge."""
        kind = frame.get("type")
        read = self._by_type.get(kind) if isinstance(kind, str) else None
        if read is not None:
            return read(frame)
        known = ", ".join(self._by_type)
        if kind is None:
            raise BadRequest(f"type: is required, one of {known}")
        raise BadRequest(f"type: must be one of {known}, got {shown(kind)}")


def client_frame(message: ClientMessage) -> dict[str, object]:
    """The map of a client's message; fields that have their default value are left out."""
    frame: dict[str, object] = {"type": _CLIENT_TYPES[type(message)]}
    return frame | (_generate(message) if isinstance(message, GenerateRequest) else _plain(message))


def _generate(request: GenerateRequest) -> dict[str, object]:
    frame: dict[str, object] = {"id": request.id}
    for part in (request, request.sampling):
        for spec in fields(part):
            value = getattr(part, spec.name)
            if spec.name not in ("id", "sampling") and value != spec.default:
                frame[spec.name] = value
    if request.messages is not None:
        frame["messages"] = [{"role": turn.role, "content": turn.content} for turn in request.messages]
    return frame


_MESSAGE_TYPES: dict[str, type[ServerMessage]] = {
    "hello": Hello,
    "accepted": Accepted,
    "started": Started,
    "tokens": Tokens,
    "finished": Finished,
    "error": Failed,
    "draining": DrainingNotice,
    "pong": Pong,
    "status": Status,
    "batch": BatchSnapshot,
}
_TYPE_NAMES = {cls: name for name, cls in _MESSAGE_TYPES.items()}


class LongArray:
    """An array that is encoded in slices of so many entries, each put into its form on the wire when its turn comes."""

    def __init__(self, entries: Sequence[Any], slice_entries: int, form: Callable[[Any], object] | None = None) -> None:
        self._entries = entries
        self._slice_entries = slice_entries
        self._form = form

    def __len__(self) -> int:
        return len(self._entries)

    def slices(self) -> Iterator[list[object]]:
        """The entries in their form, in order."""
        for start in range(0, len(self._entries), self._slice_entries):
            part = self._entries[start : start + self._slice_entries]
            yield list(part) if self._form is None else list(map(self._form, part))


def server_frame(message: ServerMessage) -> dict[str, object]:
    """The map of a server's message; what is None is left out. Log probabilities come out finite.

    Where ids and log probabilities are many, the map has a LongArray of them.
    """
    if type(message) is Tokens:  # the frame sent once a step and request: no loop over its fields
        frame: dict[str, object] = {
            "type": "tokens",
            "id": message.id,
            "index": message.index,
            "token_ids": message.token_ids,
            "text": message.text,
        }
    else:
        frame = {"type": _TYPE_NAMES[type(message)], **_plain(message)}
    if (logprobs := getattr(message, "logprobs", None)) is not None:
        if len(logprobs) > _SLICE_LOGPROBS:
            frame["logprobs"] = LongArray(logprobs, _SLICE_LOGPROBS, _finite_logprobs)
        else:
            frame["logprobs"] = [_finite_logprobs(entry) for entry in logprobs]
    ids = getattr(message, "token_ids", None)
    if ids is not None and len(ids) > _SLICE_IDS:
        frame["token_ids"] = LongArray(ids, _SLICE_IDS)
    return frame


def _plain(message: object) -> dict[str, object]:
    plain = {}
    for spec in fields(cast(Any, message)):
        value = getattr(message, spec.name)
        if value is not None:
            plain[spec.name] = _plain(value) if is_dataclass(value) else value
    if isinstance(message, BatchSnapshot):
        plain["steps"] = [_plain(step) for step in message.steps]
    return plain


def _finite_logprobs(entry: TokenLogprobs) -> tuple[float, list[tuple[int, float]]]:
    own, top = entry
    return _finite(own), [(token_id, _finite(value)) for token_id, value in top]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_FLOOR


_count = integer(0, MAX_SAFE_INTEGER)
_size = number(0, float(MAX_SAFE_INTEGER))
_text = string()
_any_id = identifier(2**16)
_ids = token_ids()
_logprobs = array(token_logprobs)


def _nested(cls: type[Any], readers: Mapping[str, Reader]) -> Reader:
    required = _without_default(cls)

    def read(name: str, value: object) -> object:
        if type(value) is not dict:
            raise wrong_type(name, value, "a map")
        return cls(**read_fields(value, readers, required=required, prefix=f"{name}."))

    return read


def _without_default(cls: type[Any]) -> tuple[str, ...]:
    return tuple(spec.name for spec in fields(cls) if spec.default is MISSING)


def _all(reader: Reader, cls: type[Any], **others: Reader) -> dict[str, Reader]:
    return {spec.name: others.get(spec.name, reader) for spec in fields(cls)}


_limits = _nested(Limits, _all(_count, Limits))
_usage = _nested(Usage, _all(_count, Usage))
_timing = _nested(Timing, _all(_size, Timing))
_step = _nested(BatchStep, {"t_ms": _size, "ms": _size, "rows": array(batch_row)})
_batch = _nested(BatchReport, _all(_count, BatchReport, mean_size=_size, hol_delay_ms=_size))

# Clients accept what the server says without bounds of their own: types alone.
_SERVER_READERS: dict[str, dict[str, Reader]] = {
    "hello": _all(_text, Hello, version=_count, limits=_limits, watch=boolean),
    "accepted": _all(_count, Accepted, id=_any_id),
    "started": {"id": _any_id},
    "tokens": {"id": _any_id, "index": _count, "token_ids": _ids, "text": _text, "logprobs": _logprobs},
    "finished": {
        "id": _any_id,
        "finish_reason": _text,
        "text": _text,
        "usage": _usage,
        "timing": _timing,
        "batch": _batch,
        "token_ids": _ids,
        "logprobs": _logprobs,
    },
    "error": {"id": _any_id, "code": _text, "status": _count, "message": _text, "retry_after_ms": _count},
    "draining": {"deadline_ms": _count},
    "pong": {"nonce": _any_id},
    "status": _all(_count, Status, state=_text, queue_ms=_size, step_ms=_size),
    "batch": _all(
        _count,
        BatchSnapshot,
        t_ms=_size,
        scheduler=_text,
        tokens_per_s=_size,
        slot_utilization=_size,
        waste_fraction=_size,
        steps=array(_step),
    ),
}
_SERVER_REQUIRED = {
    name: tuple(field for field in _without_default(cls) if (name, field) != ("error", "id"))
    for name, cls in _MESSAGE_TYPES.items()
}


def read_server_frame(frame: Mapping[str, object]) -> ServerMessage | None:
    """The message in one frame from a server; None for a type this version does not know. Raises BadRequest."""
    kind = frame.get("type")
    if not isinstance(kind, str):
        raise wrong_type("type", kind, "a string")
    if kind not in _MESSAGE_TYPES:
        return None
    values = read_fields(frame, _SERVER_READERS[kind], required=_SERVER_REQUIRED[kind])
    if kind == "error":
        values.setdefault("id", None)
    return _MESSAGE_TYPES[kind](**values)
