"""What the two ends of a connection say to each other beside the requests and their events."""

from dataclasses import dataclass

from wsbatch.messages.request import RequestId


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
