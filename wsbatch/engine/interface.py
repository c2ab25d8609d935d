"""The engine: what sessions and servers need of one. `open_engine` makes one; `BatchEngine` is its loop."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol, runtime_checkable

from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.engine.metrics import RequestMetrics
from wsbatch.engine.stream import Stream
from wsbatch.engine.watch import Watcher
from wsbatch.errors import RequestError
from wsbatch.messages import DEFAULT_PRIORITY, GenerateRequest, Status
from wsbatch.steps import ServedModel

EngineState = Literal["ready", "draining", "dead"]


class Submits(Protocol):
    """Takes requests. Whoever implements `submit` inherits `generate`."""

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Client = NOBODY,
        on_event: Callable[[Stream], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        """Tokenize and admit a request; its stream begins with `Accepted`.

        Waits for the tokenizer only, never for room. Raises RequestError where the request is refused. Cancelled, it
        leaves nothing behind. Requests of one `client` share its part of the queue, fairly with other clients.
        `on_event` is called whenever the stream turns from empty to non-empty. A request that is `checked` was read
        from a frame: nobody need read its fields again, which takes long for a long text.
        """
        ...

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[Stream]:
        """`submit` as a context manager: leaving the block cancels the request if it is still live."""
        stream = await self.submit(request)
        try:
            yield stream
        finally:
            stream.cancel()


class Engine(Submits, Protocol):
    """What a session or a server needs; a pool of engines has the same shape."""

    @property
    def info(self) -> ServedModel:
        """The model's facts."""
        ...

    @property
    def metrics(self) -> RequestMetrics:
        """What this engine counts, in a registry of its own."""
        ...

    @property
    def state(self) -> EngineState:
        """ready, draining or dead."""
        ...

    @property
    def full(self) -> bool:
        """Whether some requests made now would be refused whatever they hold: `refuse_early` tells which."""
        ...

    def refusal(self) -> RequestError | None:
        """Why a request made now would be refused (full, draining, dead); None if one may be let in.

        It speaks of a request of the default class: the queue is not full to it while a less urgent one waits there.
        """
        ...

    def refuse_early(self, client: Client = NOBODY, priority: int = DEFAULT_PRIORITY) -> RequestError | None:
        """The refusal of a request that nobody has looked at, or of a connection; None if it may be let in.

        The client must be told: it is expected back when the error says, and the next one is told a later time.
        """
        ...

    def status(self) -> Status:
        """How much work there is, for whoever shares requests out among several engines."""
        ...

    def watch(self, on_change: Callable[[], None]) -> Watcher:
        """Watch the batch: `on_change` is called after each step, arrival and end, and must not wait.

        `Watcher.take` gives what is new since the last one; `Watcher.close` ends it.
        """
        ...

    async def drain(self, grace_s: float) -> None:
        """Admit nothing more; wait for the live requests, at most `grace_s`; end the rest with `shutdown`."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """An engine that can die, because it has a model of its own. Only such a one is ever in the state `dead`."""

    async def wait_dead(self) -> RequestError:
        """Wait until the engine has died; returns why. By then every live request has its terminal event."""
        ...
