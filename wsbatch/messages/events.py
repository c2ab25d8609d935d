"""What a request's client is told, from its admission to its end."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from wsbatch.errors import RequestError
from wsbatch.messages.request import RequestId

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "shutdown"]

# A token's log probability and the k most likely tokens at its position: (own, ((token id, logprob), ...)).
TokenLogprobs: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was admitted. `seed` repeats the run; `requests_ahead` is the queue when it was admitted."""

    id: RequestId
    prompt_tokens: int
    requests_ahead: int
    seed: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Newly generated tokens. `index` is the output position of the first; `text` is whole UTF-8, perhaps empty."""

    id: RequestId
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` are prompt tokens served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds from the request's arrival. `ttft_ms` is 0 where no token came; `prefill_ms` from dispatch on.

    `batch_wait_ms` is the part of `queue_ms` in which the model was free and the policy held requests back.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float
    batch_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What the request's batch cost: token slots computed and used while it ran, and the wait for its batch mates.

    Attributes:
        max_size: rows in the largest step it was part of.
        mean_size: rows per step, averaged over its steps.
        issued_tokens: token slots computed, padding included, over its steps.
        useful_tokens: of those, tokens somebody asked for.
        hol_delay_ms: batch end minus its own end (head-of-line delay); 0 where it left at its own end and the batch
            was not run to completion.
    """

    max_size: int
    mean_size: float
    issued_tokens: int
    useful_tokens: int
    hol_delay_ms: float


NO_BATCH = BatchReport(max_size=0, mean_size=0.0, issued_tokens=0, useful_tokens=0, hol_delay_ms=0.0)
"""Of a request that was part of none."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that ran. With `stream: false`, `token_ids` and `text` are the whole output."""

    id: RequestId
    finish_reason: FinishReason
    text: str
    usage: Usage
    timing: Timing
    batch: BatchReport
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a request that failed or was refused; `id` None means the connection itself."""

    id: RequestId | None
    code: str
    status: int
    message: str
    retry_after_ms: int | None = None

    @classmethod
    def of(cls, id: RequestId | None, error: RequestError) -> "Failed":
        """What tells a client of this error."""
        return cls(id, error.code, error.status, error.message, error.retry_after_ms)


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue: its first step begins. Told on connections that have asked for a `Status`."""

    id: RequestId


Event: TypeAlias = Accepted | Started | Tokens | Finished | Failed
Terminal: TypeAlias = Finished | Failed
