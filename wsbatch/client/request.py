"""What the client's `generate` takes, and the request made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias, TypedDict, TypeGuard, TypeVar, cast

from wsbatch.messages import ChatMessage, GenerateRequest, SamplingParams

# Text, token ids, a conversation, or a whole request.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]] | GenerateRequest


class GenerateParams(TypedDict, total=False):
    """Keyword arguments of `generate`: the fields of `SamplingParams` and `GenerateRequest`, with their defaults."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    priority: int
    timeout_ms: int | None
    queue_timeout_ms: int | None
    stream: bool
    resume_token_ids: Sequence[int]
    parse_special: bool


_SAMPLING = frozenset(spec.name for spec in fields(SamplingParams))
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "top_k", "seed", "logprobs", "priority", "timeout_ms", "queue_timeout_ms"), (int,)),
    **dict.fromkeys(("temperature", "top_p"), (float, int)),
    **dict.fromkeys(("ignore_eos", "stream", "parse_special"), (bool,)),
    "prompt": (str,),
}
_ITEMS: dict[str, type] = {
    "token_ids": int,
    "resume_token_ids": int,
    "stop_token_ids": int,
    "stop": str,
    "messages": ChatMessage,
}


def build_request(prompt: Prompt, params: GenerateParams) -> GenerateRequest:
    """Raises TypeError for an unknown parameter or a value of another type. Bounds are the server's to check."""
    values: dict[str, Any] = dict(params)
    unknown = sorted(values.keys() - GenerateParams.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}: must be one of {', '.join(GenerateParams.__annotations__)}")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    sampling = {name: values.pop(name) for name in list(values) if name in _SAMPLING}
    request = _with_prompt(prompt)
    request = replace(request, sampling=replace(request.sampling, **sampling), **values)
    return replace(_checked(request), sampling=_checked(request.sampling))


def _with_prompt(prompt: Prompt) -> GenerateRequest:
    if isinstance(prompt, GenerateRequest):
        return prompt
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt)
    if not _is_array(prompt):
        raise TypeError(f"prompt must be a str, token ids, messages or a GenerateRequest, got {type(prompt).__name__}")
    if any(isinstance(item, ChatMessage | Mapping) for item in prompt[:1]):
        return GenerateRequest(messages=tuple(_turn(index, item) for index, item in enumerate(prompt)))
    return GenerateRequest(token_ids=cast(tuple[int, ...], prompt))


def _turn(index: int, item: object) -> ChatMessage:
    if isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        item = ChatMessage(role=item["role"], content=item["content"])
    if not isinstance(item, ChatMessage):
        kind = f"keys {', '.join(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
        raise TypeError(f"messages[{index}] must be a ChatMessage or a mapping with role and content, got {kind}")
    for name in ("role", "content"):
        if not isinstance(value := getattr(item, name), str):
            raise TypeError(f"messages[{index}].{name} must be str, got {type(value).__name__}")
    return item


_Part = TypeVar("_Part", GenerateRequest, SamplingParams)


def _checked(part: _Part) -> _Part:
    """With tuples for its arrays. What is None is left to the server."""
    arrays: dict[str, Any] = {}
    for spec in fields(part):
        name, value = spec.name, getattr(part, spec.name)
        kinds = _KINDS.get(name)
        if kinds is not None and value is not None and not _is_one(value, kinds):
            raise TypeError(f"{name} must be {kinds[0].__name__}, got {type(value).__name__}")
        if name in _ITEMS and value is not None:
            arrays[name] = _array(name, value, _ITEMS[name])
    return replace(part, **arrays)


def _array(name: str, value: object, kind: type) -> tuple[Any, ...]:
    if not _is_array(value):
        raise TypeError(f"{name} must be a sequence of {kind.__name__}, got {type(value).__name__}")
    items = tuple(value)
    if set(map(type, items)) - {kind}:  # at C speed: prompts are long
        for index, item in enumerate(items):
            if not _is_one(item, (kind,)):
                raise TypeError(f"{name}[{index}] must be {kind.__name__}, got {type(item).__name__}")
    if kind is ChatMessage:
        return tuple(_turn(index, item) for index, item in enumerate(items))
    return items


def _is_array(value: object) -> TypeGuard[Sequence[Any]]:
    """A str and bytes are sequences to Python, and bytes even of ints."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_one(value: object, kinds: tuple[type, ...]) -> bool:
    """To Python a bool is an int."""
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
