"""One generation as the client sees it: events in, iteration out, retried where the server says when."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import trio

from wsbatch.client.errors import ProtocolError, error_of
from wsbatch.errors import RequestError, WsbatchError
from wsbatch.messages import (
    Accepted,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    RequestId,
    Started,
    TokenLogprobs,
    Tokens,
)

Jitter: TypeAlias = Callable[[], float]


def backoff_s(error: WsbatchError, jitter: Jitter) -> float | None:
    """Seconds to wait before trying again: once to twice what the server said, so that clients do not come back as
    one; None where the server did not ask for a retry."""
    if not isinstance(error, RequestError) or error.retry_after_ms is None:
        return None
    return error.retry_after_ms / 1000 * (1 + jitter())


class Sink(Protocol):
    """What a connection delivers the events of one request to. Its methods must not wait."""

    @property
    def request(self) -> GenerateRequest:
        """What is asked, with the id of this try."""
        ...

    def start(self, id: RequestId) -> None:
        """Take the id of the next try."""
        ...

    def deliver(self, event: Event) -> None:
        """Take an event, which is in order (`Progress`). Raises ProtocolError to end the request all the same."""
        ...

    def fail(self, error: WsbatchError) -> None:
        """The connection ended first, or `deliver` raised this."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output. `logprobs` is None unless asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    accepted: Accepted
    finished: Finished


class TokenStream:
    """The events of one generation: `Accepted`, any number of `Tokens`, `Finished`.

    Iterating raises the server's error (`wsbatch.errors`) where it ends with one, ConnectionLost where the connection
    ends first, ProtocolError where tokens are missing. What has arrived is buffered, at most max_tokens of it, so a
    slow loop holds up nobody else on the connection. A cancelled iteration loses nothing.

    Attributes:
        request: what was asked; its id changes with each retry.
        retries_left: how often a refusal that says when to retry is still retried, while no token has come.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        begin: Callable[["TokenStream"], None],
        retries: int = 0,
        jitter: Jitter = random.random,
    ) -> None:
        self.request = request
        self.retries_left = retries
        self._begin = begin
        self._jitter = jitter
        self._events: deque[Accepted | Tokens | Finished | Failed] = deque()
        self._wake = trio.Event()
        self._next_index = len(request.resume_token_ids)
        self._error: WsbatchError | None = None
        self._retry_at: float | None = None
        self._done = False

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self._done else "live"
        return (
            f"<TokenStream {self.request.id!r} {state}, {self._next_index} tokens, {len(self._events)} events unread>"
        )

    def start(self, id: RequestId) -> None:
        """Take the id of the next try."""
        self.request = replace(self.request, id=id)

    def deliver(self, event: Event) -> None:
        """Take an event from the connection."""
        if isinstance(event, Tokens):
            self._next_index += len(event.token_ids)
        if not isinstance(event, Started):  # told to routers, which ask for the server's status
            self._events.append(event)
            self._wake.set()

    def fail(self, error: WsbatchError) -> None:
        """End with an error of the client's own, after what has arrived."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Accepted | Tokens | Finished:
        await trio.lowlevel.checkpoint()
        while True:
            if self._done:
                raise StopAsyncIteration
            if self._retry_at is not None:
                await trio.sleep_until(self._retry_at)
                self._retry_at = None
                self._begin(self)
            if self._events:
                event = self._events.popleft()
                if not isinstance(event, Failed):
                    self._done = isinstance(event, Finished)
                    return event
                self._failed(error_of(event))
            elif self._error is not None:
                raise self._error
            else:
                self._wake = trio.Event()
                await self._wake.wait()

    async def completion(self) -> Completion:
        """Wait for the end and return the whole output. Instead of iterating, not after it."""
        accepted = finished = None
        text: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for event in self:
            match event:
                case Accepted():
                    accepted = event
                case Tokens():
                    text.append(event.text)
                    token_ids += event.token_ids
                    logprobs += event.logprobs or ()
                case Finished():
                    finished = event
                    text.append(event.text)
                    token_ids += event.token_ids or ()
                    logprobs += event.logprobs or ()
        if accepted is None or finished is None:
            raise ProtocolError(f"request {self.request.id}: finished without having been accepted")
        return Completion("".join(text), tuple(token_ids), tuple(logprobs) or None, accepted, finished)

    def _failed(self, error: RequestError) -> None:
        delay_s = backoff_s(error, self._jitter)
        if delay_s is None or self.retries_left == 0 or self._next_index > len(self.request.resume_token_ids):
            self._error = error
        else:
            self.retries_left -= 1
            self._retry_at = trio.current_time() + delay_s
