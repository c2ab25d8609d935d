"""What the client's `generate` takes, and the request made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias, TypedDict

from wsbatch.messages import ChatMessage, GenerateRequest, SamplingParams

# Text, token ids, a conversation, or a whole request.
Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]] | GenerateRequest


class GenerateParams(TypedDict, total=False):
    """Keyword arguments of `generate`: the fields of `SamplingParams` and `GenerateRequest`, with their defaults."""

    max_tokens: int
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


_SAMPLING = frozenset(spec.name for spec in fields(SamplingParams))


def build_request(prompt: Prompt, params: GenerateParams) -> GenerateRequest:
    """Raises TypeError for an unknown parameter or a prompt of another kind. Bounds are the server's to check."""
    values: dict[str, Any] = dict(params)
    unknown = sorted(values.keys() - GenerateParams.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown parameter {unknown[0]!r}: must be one of {', '.join(GenerateParams.__annotations__)}")
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids", "resume_token_ids"):
        if name in values:
            values[name] = tuple(values[name])
    sampling = {name: values.pop(name) for name in list(values) if name in _SAMPLING}
    request = _with_prompt(prompt)
    return replace(request, sampling=replace(request.sampling, **sampling), **values)


def _with_prompt(prompt: Prompt) -> GenerateRequest:
    if isinstance(prompt, GenerateRequest):
        return prompt
    if isinstance(prompt, str):
        return GenerateRequest(prompt=prompt)
    if isinstance(prompt, Sequence):
        if all(type(item) is int for item in prompt):
            return GenerateRequest(token_ids=tuple(item for item in prompt if isinstance(item, int)))
        return GenerateRequest(messages=tuple(_turn(item) for item in prompt))
    raise TypeError(f"prompt must be a str, token ids, messages or a GenerateRequest, got {type(prompt).__name__}")


def _turn(item: object) -> ChatMessage:
    if isinstance(item, ChatMessage):
        return item
    if isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        return ChatMessage(role=item["role"], content=item["content"])
    raise TypeError(f"a message must be a ChatMessage or a mapping with role and content, got {item!r}")
