"""A conversation's connection: made anew when it is lost, and the answer gone on with where it stopped."""

import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

import trio

from wsbatch.client import Client
from wsbatch.errors import ConnectionLost, Draining, RequestError, WsbatchError
from wsbatch.messages import Accepted, Event, Finished, GenerateRequest, Tokens

# How long a server may be away before an answer is given up, and between two tries at most.
_PATIENCE_S = 60.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 8.0

Tell: TypeAlias = Callable[[Event], Awaitable[None]]


class Link:
    """Asks one server, one request at a time.

    Args:
        nursery: where the connection lives.
        dial: makes a connection.
        notify: told in words what is being waited for.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        dial: Callable[[], AbstractAsyncContextManager[Client]],
        *,
        notify: Callable[[str], None],
    ) -> None:
        self._nursery = nursery
        self._dial = dial
        self._notify = notify
        self._client: Client | None = None
        self._dropped = trio.Event()

    async def client(self) -> Client:
        """The connection; made where there is none. Raises what connecting raises."""
        if self._client is None:
            self._client = await self._nursery.start(self._hold)
        return self._client

    async def ask(self, request: GenerateRequest, tell: Tell) -> None:
        """Wait for the whole answer, telling every event once, however many connections it takes.

        Raises what cannot be mended by asking again, or is not within a minute. Cancelled, it cancels the request.
        """
        answer = _Answer(request)
        patience = _Patience()
        while not answer.complete:
            try:
                client = await self.client()
                answer.check_model(client.hello.model)
                async with client.generate(answer.rest()) as stream:
                    async for event in stream:
                        if isinstance(event, Finished) and event.finish_reason == "shutdown":
                            raise ConnectionLost("the server shut down")
                        answer.note(event)
                        if isinstance(event, Tokens):
                            patience.renew()
                        await tell(event)
            except (ConnectionLost, RequestError) as error:
                delay_s = patience.delay_s(error)
                if delay_s is None:
                    raise
                if isinstance(error, ConnectionLost | Draining):
                    self.drop()
                if not patience.tried:
                    self._notify(f"{error}; trying again for up to {_PATIENCE_S:.0f} s")
                patience.tried = True
                await trio.sleep(delay_s)

    def drop(self) -> None:
        """Close the connection; the next `client` makes another."""
        self._dropped.set()
        self._client = None

    async def _hold(self, *, task_status: trio.TaskStatus[Client]) -> None:
        # In a task of its own, so that an answer's cancel scope may end while the connection lives on.
        async with self._dial() as client:
            dropped = self._dropped = trio.Event()
            task_status.started(client)
            await dropped.wait()


class _Answer:
    """How far an answer has come, and what to ask for the rest of it.

    Only `finished` ends it: where every token is there, it may still bring text that was held back.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.complete = False
        self._request = request
        self._token_ids: list[int] = []
        self._seed = request.sampling.seed
        self._model: str | None = None

    def note(self, event: Event) -> None:
        match event:
            case Accepted():
                self._seed = event.seed
            case Tokens():
                self._token_ids += event.token_ids
            case Finished():
                self.complete = True

    def check_model(self, model: str) -> None:
        if self._token_ids and self._model != model:
            raise WsbatchError(f"the server now runs {model!r}, which cannot go on with the answer of {self._model!r}")
        self._model = model

    def rest(self) -> GenerateRequest:
        sampling = replace(self._request.sampling, seed=self._seed)
        return replace(self._request, sampling=sampling, resume_token_ids=tuple(self._token_ids))


class _Patience:
    """Delays between tries: as the server says, else doubling. Over when a minute has brought nothing."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.tried = False
        self._until_s = trio.current_time() + _PATIENCE_S
        self._next_s = _FIRST_DELAY_S

    def delay_s(self, error: WsbatchError) -> float | None:
        """None where trying again is of no use, or no longer."""
        spread = 1 + random.random()
        if isinstance(error, RequestError):
            delay_s = None if error.retry_after_ms is None else error.retry_after_ms / 1000 * spread
        else:
            delay_s = self._next_s * spread / 2
            self._next_s = min(2 * self._next_s, _LONGEST_DELAY_S)
        if delay_s is None or trio.current_time() + delay_s > self._until_s:
            return None
        return delay_s
