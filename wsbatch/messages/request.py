"""What a client asks for: one generation."""

import secrets
from dataclasses import dataclass, field, replace
from typing import TypeAlias

RequestId: TypeAlias = int | str

DEFAULT_PRIORITY = 5
"""Of the classes 0 (most urgent) to 9, the one of a request that names none."""

LEAST_URGENT = 9

_SEED_BITS = 53  # what a number has in every JSON

DEFAULT_MAX_TOKENS = 256
"""Of a request that names no `max_tokens`; less where the context has less room left."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when they stop.

    Attributes:
        max_tokens: tokens generated at most; at least 1. None: DEFAULT_MAX_TOKENS, or what is left of the context.
        temperature: 0 is greedy (the default); otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches it; 1 keeps all.
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: below 2**53; None lets the server draw one, reported in `Accepted.seed`.
        stop: strings that end the text before them.
        stop_token_ids: ids that end the output, themselves not part of it.
        ignore_eos: generate past the model's own end-of-sequence tokens.
        logprobs: None for none; k for each token's own log probability and the k most likely.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def most_tokens(self) -> int:
        """The bound on the output, as far as it is known without the prompt."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def seeded(self) -> "SamplingParams":
        """The same with a seed: one that is drawn now, where it has none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(_SEED_BITS))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation, for the model's chat template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. Exactly one of `prompt`, `token_ids`, `messages` is set.

    Attributes:
        id: chosen by the client, unique among its live requests on the connection.
        priority: 0 (most urgent) to 9.
        timeout_ms: bound on the whole request, from its arrival; None for none.
        queue_timeout_ms: bound on the time in the queue; may only shorten the server's.
        stream: False sends no `Tokens`; the terminal event carries everything.
        resume_token_ids: already generated elsewhere: prefilled after the prompt, counted as output, not sent again.
        parse_special: the literals of special tokens in `prompt` are these tokens, and not text.
    """

    id: RequestId = 0
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = DEFAULT_PRIORITY
    timeout_ms: int | None = None
    queue_timeout_ms: int | None = None
    stream: bool = True
    resume_token_ids: tuple[int, ...] = ()
    parse_special: bool = False
