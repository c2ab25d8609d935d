"""Peers that speak OpenAI's completions API over streaming HTTP: vLLM, llama.cpp's server, OpenVINO's, and others."""

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import trio

from wsbatch_bench.load.http_client import Dial, HttpFailed, request
from wsbatch_bench.load.record import Record

Prompt = Callable[[tuple[int, ...]], list[int] | str]
"""What is sent for a trace's prompt ids."""

_NOT_SERVED = {"http_401", "http_403", "http_404", "http_405", "http_501"}
_WORD = re.compile("Ġ[a-z]{3,}")  # how a byte-level vocabulary writes a space and a word


class OpenAiTarget:
    """One endpoint, such as http://127.0.0.1:8000/v1/completions. Each request has a connection of its own.

    Prompts are token ids and lengths exact (`ignore_eos`, `min_tokens`), so that every server does the same work. A
    server that ignores these gets a run that is marked invalid, because the tokens do not add up.

    Args:
        extra: fields of the request's body on top of ours; None leaves a field out, for servers that refuse what they
            do not know.
        make_prompt: the prompt for servers that take no token ids (`text_prompts`).
    """

    backend = "openai"

    def __init__(
        self,
        model: str,
        *,
        dial: Dial,
        host: str,
        path: str,
        auth_token: str | None = None,
        extra: dict[str, Any] | None = None,
        make_prompt: Prompt = list,
    ) -> None:
        self.model = model
        self._dial = dial
        self._host = host
        self._path = path
        self._headers = [] if auth_token is None else [("Authorization", f"Bearer {auth_token}")]
        self._extra = extra or {}
        self._make_prompt = make_prompt

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        """See `Target.send`."""
        body = {
            "model": self.model,
            "prompt": self._make_prompt(prompt_ids),
            "max_tokens": record.output_tokens,
            "min_tokens": record.output_tokens,
            "ignore_eos": True,
            "temperature": record.sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if record.sampling.temperature:
            body |= {"top_p": record.sampling.top_p, "seed": record.sampling.seed}
        body |= self._extra
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        record.sent_s = trio.current_time() - start_s
        try:
            async with request(self._dial, self._host, self._path, body=data, headers=self._headers) as chunks:
                await self._read(record, chunks, start_s)
            record.ended_s = trio.current_time() - start_s
        except HttpFailed as error:
            unreached = error.code in _NOT_SERVED and not record.arrivals
            record.failed(error.code, trio.current_time() - start_s, str(error), unreached=unreached)
        except OSError as error:
            record.failed(
                type(error).__name__, trio.current_time() - start_s, str(error), unreached=not record.arrivals
            )

    async def totals(self) -> None:
        """These servers count in ways of their own."""
        return

    async def _read(self, record: Record, chunks: AsyncIterator[bytes], start_s: float) -> None:
        counted_events = 0
        async with aclosing(_events(chunks)) as events:
            async for event in events:
                now_s = trio.current_time() - start_s
                # Without text it may be the news of the finish alone, or the first bytes of a character.
                if any(choice.get("text") for choice in event.get("choices", [])):
                    record.arrivals.append((now_s, 1))
                usage = event.get("usage") or {}
                if usage.get("prompt_tokens", record.prompt_tokens) != record.prompt_tokens:
                    raise HttpFailed("prompt_length", f"{usage['prompt_tokens']} prompt tokens, not as many as sent")
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                record.cached_tokens = cached or record.cached_tokens
                counted = usage.get("completion_tokens")
                if counted is not None:
                    _count(record, counted_events, counted, now_s)
                    counted_events = len(record.arrivals)
                    record.reported_tokens = counted
        if record.reported_tokens is None:
            record.reported_tokens = record.tokens


def _count(record: Record, first: int, total: int, now_s: float) -> None:
    """All tokens so far are `total`: those since the last count came in the arrivals from `first` on, now if in none.

    One arrival brought all of them; several one each, or nobody knows how many each: they are spread evenly. More
    arrivals than tokens stay as they are, and the run is invalid.
    """
    times_s = [at_s for at_s, _ in record.arrivals[first:]] or [now_s]
    tokens = total - sum(count for _, count in record.arrivals[:first])
    if 0 < tokens < len(times_s):
        return
    if 1 < len(times_s) < tokens:
        record.sizes_told = False
    bounds = [index * tokens // len(times_s) for index in range(len(times_s) + 1)]
    record.arrivals[first:] = [
        (at_s, later - earlier) for at_s, (earlier, later) in zip(times_s, pairwise(bounds), strict=True) if tokens > 0
    ]


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON of each server-sent event. Raises HttpFailed for what is none, and for an error sent as one."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            try:
                event = json.loads(line[5:])
            except ValueError:
                raise HttpFailed("not_json", f"not an event of JSON: {line[:100]!r}") from None
            if not isinstance(event, dict) or "error" in event:
                raise HttpFailed("server_error", f"{event}")
            yield event


class TextPrompts:
    """Each id of a prompt stands for one word, which this model's tokenizer makes one token of.

    The work is the same as with ids; the ids are not. A tokenizer that adds special tokens (BOS) of its own is given
    that many words fewer.
    """

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json. Raises ValueError where that cannot be done, or it has no such words."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (tokenizers raises nothing else)
            raise ValueError(f"{path}: not a tokenizer ({error})") from None
        words = [" " + token[1:] for token in sorted(tokenizer.get_vocab()) if _WORD.fullmatch(token)]
        encoded = tokenizer.encode_batch(words, add_special_tokens=False)
        self._words = [word for word, each in zip(words, encoded, strict=True) if len(each.ids) == 1]
        self._specials = tokenizer.num_special_tokens_to_add(False)
        if not self._words:
            raise ValueError(f"{path}: no token is a space and a word; the vocabulary must be byte-level")

    def __call__(self, prompt_ids: tuple[int, ...]) -> str:
        """Text of as many tokens as there are ids."""
        return "".join(self._words[id_ % len(self._words)] for id_ in prompt_ids[self._specials :])
