"""The replicas of one pool: which there are, and which of them a request goes to."""

from collections.abc import Callable, Iterator, Mapping

import trio

from wsbatch.client.errors import ProtocolError
from wsbatch.config import PoolConfig
from wsbatch.errors import QueueFull, RequestError
from wsbatch.messages import Hello
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.placement import Placement
from wsbatch.pool.replica import Kind, Replica
from wsbatch.pool.search import Search
from wsbatch.pool.upkeep import Dial, Upkeep
from wsbatch.steps import ServedModel


class Replicas(Mapping[str, Replica]):
    """By name. Run `run` in a task.

    Args:
        config: how they are treated.
        clock: silences are measured on it.
        on_change: called after one has become ready, or has said how much work it has.

    Attributes:
        found: set once the first of them is ready.
    """

    def __init__(self, config: PoolConfig, *, clock: LoopClock, on_change: Callable[[], None]) -> None:
        self.found = trio.Event()
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self._by_name: dict[str, Replica] = {}
        self._upkeeps: dict[Replica, Upkeep] = {}  # of those, too, that are being let go of
        self._placement = Placement(config)
        self._hello: Hello | None = None  # of the kind that has been here the longest
        self._nursery: trio.Nursery | None = None

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def ready(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica in self._by_name.values() if replica.state == "ready"]

    @property
    def info(self) -> ServedModel:
        """What they serve; of several revisions, the one that was here first. The length is what the largest of them
        takes."""
        assert self._hello is not None, "wait for `found` first"
        hello = self._hello
        limits = [replica.limits for replica in self.ready if replica.limits is not None] or [hello.limits]
        length = max(limit.max_model_len for limit in limits)
        return ServedModel(hello.model, hello.revision, hello.dtype, "replicas", length)

    def add(self, name: str, dial: Dial) -> Replica:
        """Take a replica in; it is used from when it is ready on. Raises ValueError for a name that is taken."""
        if name in self._by_name:
            raise ValueError(f"replica {name!r} is there already")
        replica = self._by_name[name] = Replica(
            name, self._config, clock=self._clock, on_change=self._changed, on_lost=self._placement.forget
        )
        upkeep = self._upkeeps[replica] = Upkeep(replica, dial, self._config, clock=self._clock, admit=self._admit)
        if self._nursery is not None:
            self._nursery.start_soon(upkeep.run)
        return replica

    def withdraw(self, name: str) -> Replica:
        """Send nothing more to this replica; `let_go` of it once what is on it has ended."""
        return self._by_name.pop(name)

    def let_go(self, replica: Replica) -> None:
        """End the connections to one that was withdrawn."""
        replica.scope.cancel()
        del self._upkeeps[replica]

    def place(self, search: Search) -> Replica | None:
        """The replica for a request; None where none can take it now."""
        chosen = self._placement.place(search, self.ready)
        if chosen is not None:
            # The next one looks at the others first, where all have the same to do.
            self._by_name[chosen.name] = self._by_name.pop(chosen.name)
        return chosen

    def others_may_take(self, search: Search, by: Replica, error: RequestError, *, was_sent: bool) -> bool:
        """One refuses a request, or would refuse it (`was_sent`); whether another one may take it."""
        if search.was_full(error):
            return True
        return search.was_too_large(by, error, was_sent=was_sent) and self._placement.fits_elsewhere(search, self.ready)

    def has(self, kind: Kind) -> bool:
        """Whether there is one of this kind, or there was one that may come back."""
        return "" not in kind and any(replica.kind == kind for replica in self._by_name.values())

    def refusal(self) -> QueueFull | None:
        """Why any request made now would be refused; None if one may be let in."""
        ready = self.ready
        retries = [replica.retry_after_ms for replica in ready]
        if None in retries:
            return None
        full = min((retry for retry in retries if retry is not None), default=None)
        if full is None:
            return QueueFull("no replica is there", retry_after_ms=1000)
        return QueueFull(f"all {len(ready)} replicas are full", retry_after_ms=full)

    async def run(self) -> None:
        """Keep up the connections until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                for upkeep in self._upkeeps.values():
                    self._nursery.start_soon(upkeep.run)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def _admit(self, hello: Hello) -> None:
        """One pool, one model: of several revisions, perhaps, while they are being replaced."""
        if self._hello is not None and hello.model != self._hello.model:
            raise ProtocolError(f"it serves {hello.model!r}, the others {self._hello.model!r}")

    def _changed(self, replica: Replica) -> None:
        if replica.state == "ready":
            assert replica.hello is not None
            if self._hello is not None and replica.hello.model != self._hello.model:  # connected at the same time
                replica.lose(f"it serves {replica.hello.model!r}, the others {self._hello.model!r}")
                return
            if self._hello is None or not self.has((self._hello.revision, self._hello.dtype)):
                self._hello = replica.hello
            self.found.set()
        self._on_change()
