"""What a `generate` may hold: one table of readers, for frames from a client and for requests made in this process."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from wsbatch.errors import BadRequest
from wsbatch.messages import LEAST_URGENT, ChatMessage, GenerateRequest, SamplingParams
from wsbatch.wire.fields import (
    MAX_SAFE_INTEGER,
    MAX_TOKEN_ID,
    Reader,
    WireLimits,
    array,
    boolean,
    chat_message,
    identifier,
    integer,
    number,
    read_fields,
    string,
    token_ids,
    wrong_type,
)
from wsbatch.wire.unsupported import refuse_in_message, refuse_unsupported

_PROMPTS = ("prompt", "token_ids", "messages")


def sampling_readers(limits: WireLimits) -> dict[str, Reader]:
    """The fields of `SamplingParams` and their bounds."""
    return {
        "max_tokens": integer(1, limits.max_tokens),
        "temperature": number(0, 100),
        "top_p": number(0, 1, above=True),
        "top_k": integer(0, MAX_TOKEN_ID),
        "seed": integer(0, MAX_SAFE_INTEGER),
        "stop": array(string(low=1, high=limits.max_stop_chars), high=limits.max_stop),
        "stop_token_ids": array(integer(0, MAX_TOKEN_ID), high=limits.max_stop_token_ids),
        "ignore_eos": boolean,
        "logprobs": integer(0, limits.max_logprobs),
    }


def request_readers(limits: WireLimits) -> dict[str, Reader]:
    """The other fields of a `GenerateRequest` and their bounds."""
    return {
        "id": identifier(limits.max_id_bytes),
        "prompt": string(low=1),
        "token_ids": token_ids(low=1, high=limits.max_token_ids),
        "messages": array(_turn, low=1, high=limits.max_messages),
        "priority": integer(0, LEAST_URGENT),
        "timeout_ms": integer(1, limits.max_timeout_ms),
        "queue_timeout_ms": integer(1, limits.max_timeout_ms),
        "stream": boolean,
        "resume_token_ids": token_ids(high=limits.max_token_ids),
        "parse_special": boolean,
    }


class GenerateFields:
    """The fields of a `generate`, within `limits`."""

    def __init__(self, limits: WireLimits) -> None:
        self._sampling = sampling_readers(limits)
        self._request = request_readers(limits)

    def read(self, frame: Mapping[str, object]) -> GenerateRequest:
        """The request in a frame. Raises BadRequest or TooLarge."""
        values = read_fields(frame, self._request, required=("id",))
        refuse_unsupported(frame)
        return _request(values, read_fields(frame, self._sampling))

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """An equal request, of nothing but what a frame could have said. Raises what `read` raises, in its words.

        Unlike on the wire, None is no way to leave out a field whose default is another value.
        """
        sampling = request.sampling
        if not isinstance(sampling, SamplingParams):
            raise wrong_type("sampling", sampling, "a SamplingParams")
        return _request(_attributes(request, self._request), _attributes(sampling, self._sampling))


def _turn(name: str, value: object) -> ChatMessage:
    if type(value) is dict:
        refuse_in_message(name, value)
    return chat_message(name, value)


def _attributes(owner: GenerateRequest | SamplingParams, readers: Mapping[str, Reader]) -> dict[str, Any]:
    values = {}
    for spec in fields(owner):
        value = getattr(owner, spec.name)
        if spec.name in readers and (value is not None or spec.default is not None):
            values[spec.name] = readers[spec.name](spec.name, value)
    return values


def _request(values: dict[str, Any], sampling: dict[str, Any]) -> GenerateRequest:
    prompts = [name for name in _PROMPTS if name in values]
    if len(prompts) != 1:
        raise BadRequest(f"prompt, token_ids, messages: give exactly one, got {' and '.join(prompts) or 'none'}")
    return GenerateRequest(**values, sampling=SamplingParams(**sampling))
