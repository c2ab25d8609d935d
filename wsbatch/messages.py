"""What crosses an edge: the requests a client makes and the events it gets back. Frozen, plain data.

`wire` turns these into bytes and back; `engine` and `stream` produce and consume them; nothing here does anything.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

RequestId: TypeAlias = int | str
FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "shutdown"]

# A token's log probability and the k most likely tokens at its position: (own, ((token id, logprob), ...)).
TokenLogprobs: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]

DEFAULT_PRIORITY = 5
"""Of the classes 0 (most urgent) to 9, the one of a request that names none."""

LEAST_URGENT = 9

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

    `batch_wait_ms` is the part of `queue_ms` in which the model was free and the policy held requests for company.
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


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue: its first step begins. Told on connections that have asked for a `Status`."""

    id: RequestId


Event: TypeAlias = Accepted | Started | Tokens | Finished | Failed
Terminal: TypeAlias = Finished | Failed


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server accepts, told in `Hello`. Tokens, bytes, requests."""

    max_model_len: int
    max_message_bytes: int
    max_live_requests: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame on every connection. `state` is one of ready, draining, dead; `watch`: whether it is allowed.

    `revision` and `dtype` are the weights and the arithmetic: where both are equal, one server can go on with what
    another began. Empty where the server does not say.
    """

    version: int
    model: str
    server: str
    limits: Limits
    state: str
    watch: bool = False
    revision: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """How much work an engine has, for whoever shares requests out among several.

    Attributes:
        state: one of ready, draining, dead.
        waiting: requests in the queue.
        running: live requests past the queue.
        queued_tokens: prompt tokens of the waiting requests, and what they may still generate.
        running_tokens: tokens that the running requests may still generate.
        max_batch_size: rows that a step can have.
        queue_ms: how long the longest waiting request has waited; 0 where none waits.
        step_ms: how long the step in flight has been running; 0 where none is.
        retry_after_ms: when to try again, where a request made now would be refused; None where it would be let in.
    """

    state: str
    waiting: int
    running: int
    queued_tokens: int
    running_tokens: int
    max_batch_size: int
    queue_ms: float
    step_ms: float
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class DrainingNotice:
    """The server is shutting down: live requests have `deadline_ms` left, new ones are refused."""

    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop this request; its terminal event still comes. Unknown ids are ignored (it may just have ended)."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class Ping:
    """Application-level ping, for clients (browsers) that cannot send WebSocket pings."""

    nonce: int | str


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to `Ping`, with its nonce."""

    nonce: int | str


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Ask for a `Status`; from then on the connection is also told of each request's start, as `Started`."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell this connection about the batch, as it runs, in `BatchSnapshot`s."""


@dataclass(frozen=True, slots=True)
class Unwatch:
    """No more `BatchSnapshot`s."""


# What a row was to a step. kept: its request is over, and it is computed all the same, because its padded batch runs
# on. held: it has its slot and its cache, but no part in the step.
RowPhase: TypeAlias = Literal["prefill", "decode", "kept", "held"]


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One model step: when it began, how long it took, and (slot, key, phase) of every row that held a slot.

    `key` is the engine's own number of the request: it tells rows apart, and nothing else. A slot that is not named
    was idle.
    """

    t_ms: float
    ms: float
    rows: tuple[tuple[int, int, RowPhase], ...]


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """The batch now, and the steps since the snapshot before; no text and no token of anybody's.

    Attributes:
        t_ms: now, on the clock of `steps`; it starts with the engine.
        scheduler: dynamic or continuous.
        slots: rows that a step can have.
        queue_depth: requests waiting.
        running: live requests past the queue.
        tokens_per_s: tokens generated for requests in the last second.
        slot_utilization: useful share of the decode slots issued in the last second; None where there was none.
        waste_fraction: share of all token slots, prompts' and padding included, issued in the last second that nobody
            asked for; None where there was none.
        steps: completed since the snapshot before, oldest first; bounded.
        steps_dropped: how many older ones are missing, because they were too many.
    """

    t_ms: float
    scheduler: str
    slots: int
    queue_depth: int
    running: int
    tokens_per_s: float
    steps: tuple[BatchStep, ...]
    steps_dropped: int = 0
    slot_utilization: float | None = None
    waste_fraction: float | None = None


ClientMessage: TypeAlias = GenerateRequest | Cancel | Ping | GetStatus | Watch | Unwatch
ServerMessage: TypeAlias = (
    Hello | Accepted | Started | Tokens | Finished | Failed | DrainingNotice | Pong | Status | BatchSnapshot
)
