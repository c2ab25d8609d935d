"""`EnginePool`: an engine whose steps are run elsewhere. `open_pool` makes one."""

from collections.abc import Callable
from dataclasses import replace

import trio

from wsbatch.batching.fairness import NOBODY, Client
from wsbatch.config import PoolConfig
from wsbatch.engine.deadlines import Deadlines
from wsbatch.engine.interface import EngineState, Submits
from wsbatch.engine.stream import Stream
from wsbatch.engine.watch import BatchRecorder, Watcher
from wsbatch.errors import Draining, RequestError
from wsbatch.messages import DEFAULT_PRIORITY, Failed, Finished, GenerateRequest, Status
from wsbatch.pool.loop_clock import LoopClock
from wsbatch.pool.metrics import PoolMetrics
from wsbatch.pool.replica import Replica
from wsbatch.pool.replicas import Replicas
from wsbatch.pool.route import Route
from wsbatch.pool.upkeep import Dial
from wsbatch.steps import ServedModel

_LAST_ANSWERS_S = 1.5


class EnginePool(Submits):
    """Implements `Engine` over replicas. Run `run` in a task; `open_pool` does.

    Attributes:
        config: the bounds.
        clock: silences are measured on it.
        replicas: by name.
    """

    def __init__(self, config: PoolConfig | None = None) -> None:
        self.config = config or PoolConfig()
        self.clock = LoopClock()
        self.replicas = Replicas(self.config, clock=self.clock, on_change=self._dispatch_waiting)
        self._routes: dict[int, Route] = {}
        self._waiting: dict[int, Route] = {}
        self._last_key = 0
        self._draining = False
        self._ended = trio.lowlevel.ParkingLot()  # who waits for requests to end, here or on a replica
        self._deadlines = Deadlines()
        self._sooner = trio.Event()  # set when one is due before all others
        self._recorder = BatchRecorder("pool", 0, now_s=trio.current_time())
        self.metrics = PoolMetrics(
            running=lambda: self._count()[1],
            waiting=lambda: self._count()[0],
            ready=lambda: len(self.replicas.ready),
            ejected=lambda: sum(replica.health.ejected for replica in self.replicas.ready),
        )

    def __repr__(self) -> str:
        return f"<EnginePool {self.state}: {len(self._routes)} live, {list(self.replicas.values())}>"

    @property
    def info(self) -> ServedModel:
        """Of the replicas."""
        return self.replicas.info

    @property
    def state(self) -> EngineState:
        """ready or draining; a pool does not die, even where all its replicas are away."""
        return "draining" if self._draining else "ready"

    def add(self, name: str, dial: Dial) -> Replica:
        """Take a replica in; it is used from when it is ready on. Raises ValueError for a name that is taken."""
        return self.replicas.add(name, dial)

    async def remove(self, name: str, grace_s: float = 0.0) -> None:
        """Send nothing more to this replica, wait for what is on it, at most `grace_s`, and let go of it.

        What is still on it then goes on elsewhere, or ends with `shutdown` where no other replica may go on with it.
        """
        replica = self.replicas.withdraw(name)
        await self._wait_ended(grace_s, lambda: replica.live)
        for route in list(self._routes.values()):
            if route.attempt is not None and route.attempt.replica is replica:
                route.move_away()
        await self._wait_ended(_LAST_ANSWERS_S, lambda: replica.live)
        self.replicas.let_go(replica)

    async def wait_ready(self) -> None:
        """Wait for the first replica to answer."""
        await self.replicas.found.wait()

    @property
    def full(self) -> bool:
        """See `Engine.full`."""
        return self.refusal() is not None

    def refusal(self) -> RequestError | None:
        """Why any request made now would be refused; None if one may be let in."""
        if self._draining:
            return Draining("the router is shutting down", retry_after_ms=1000)
        return self.replicas.refusal()

    def refuse_early(self, client: Client = NOBODY, priority: int = DEFAULT_PRIORITY) -> RequestError | None:
        """See `Engine.refuse_early`. Classes, and who is expected when, are the replicas' matter."""
        return self.refusal()

    def status(self) -> Status:
        """The replicas' work, in sum; the longest wait and step of any."""
        known = [replica.status for replica in self.replicas.ready if replica.status is not None]
        refusal = self.refusal()
        return Status(
            state=self.state,
            waiting=sum(status.waiting for status in known),
            running=sum(status.running for status in known),
            queued_tokens=sum(status.queued_tokens for status in known),
            running_tokens=sum(status.running_tokens for status in known),
            max_batch_size=sum(status.max_batch_size for status in known),
            queue_ms=max((status.queue_ms for status in known), default=0.0),
            step_ms=max((status.step_ms for status in known), default=0.0),
            retry_after_ms=None if refusal is None else refusal.retry_after_ms,
        )

    async def submit(
        self,
        request: GenerateRequest,
        *,
        client: Client = NOBODY,
        on_event: Callable[[Stream], None] | None = None,
        checked: bool = False,
    ) -> Stream:
        """See `Engine.submit`. Waits for a replica's answer. Fair shares and the request's fields are its matter."""
        await trio.lowlevel.checkpoint()
        if (refusal := self.refusal()) is not None:
            self.metrics.count_refused(refusal.code)
            raise refusal
        # The seed is drawn here and not by the replica: another one may have to go on with it.
        request = replace(request, sampling=request.sampling.seeded())
        self._last_key += 1
        route = self._routes[self._last_key] = Route(self, self._last_key, request, on_event=on_event)
        try:
            route.dispatch()
            await route.answer.decided.wait()
        except BaseException:
            route.drop()
            raise
        if route.answer.refusal is not None:
            raise route.answer.refusal
        stream = route.answer.stream
        assert stream.accepted is not None
        self.metrics.prompt_tokens.inc(stream.accepted.prompt_tokens)
        return stream

    def watch(self, on_change: Callable[[], None]) -> Watcher:
        """See `Engine.watch`: only the counts of requests; the steps are the replicas'."""
        return self._recorder.watch(on_change)

    async def drain(self, grace_s: float) -> None:
        """See `Engine.drain`. The replicas themselves are left as they are. Cancelled, it ends what is live at once."""
        self._draining = True
        try:
            await self._wait_ended(grace_s, lambda: len(self._routes))
            for route in list(self._routes.values()):
                route.end("shutdown")
            await self._wait_ended(_LAST_ANSWERS_S, lambda: len(self._routes))
        finally:
            self._end_all()

    async def run(self) -> None:
        """Keep up the connections to the replicas until cancelled; then what is live ends with `shutdown`."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.clock.run)
                nursery.start_soon(self.replicas.run)
                await self._wake_routes()
        finally:
            self._end_all()

    # What routes need.

    def retry_later(self, route: Route) -> None:
        """None can take it: `dispatch` it again when that has changed, but not before its `not_before_s`."""
        self._waiting[route.key] = route

    def wake_at(self, route: Route, at_s: float) -> None:
        """Call its `wake` then, and not when it asked for before."""
        if at_s < self._deadlines.next_s:
            self._sooner.set()
        self._deadlines.set(route.key, at_s)

    def moved(self, route: Route) -> None:
        """It goes to another replica because of what happened on the one before."""
        (self.metrics.moved if route.search.kind is None else self.metrics.resumed).inc()
        self._ended.unpark_all()

    def ended(self, route: Route) -> None:
        """It has its terminal event, or was refused, or nobody wants it."""
        self._waiting.pop(route.key, None)
        self._deadlines.drop(route.key)
        if self._routes.pop(route.key, None) is None:
            return
        terminal = route.answer.stream.terminal
        if isinstance(terminal, Finished):
            self.metrics.observe_finished(terminal)
        elif isinstance(terminal, Failed):
            self.metrics.count_refused(terminal.code)
        elif route.answer.refusal is not None:
            self.metrics.count_refused(route.answer.refusal.code)
        self._ended.unpark_all()
        self._tell_watchers()

    async def _wake_routes(self) -> None:
        """Wake each in time, until cancelled."""
        while True:
            for key in self._deadlines.due(trio.current_time()):
                if (route := self._routes.get(key)) is not None:
                    route.wake()
            self._sooner = trio.Event()
            with trio.move_on_at(self._deadlines.next_s):
                await self._sooner.wait()

    def _dispatch_waiting(self) -> None:
        """A replica is ready, or has said how much work it has: what waits may have a place there."""
        now_s = trio.current_time()
        for route in sorted(self._waiting.values(), key=lambda route: (route.request.priority, route.key)):
            if route.search.kind is not None and not self.replicas.has(route.search.kind):
                route.give_up()
            elif now_s >= route.not_before_s:
                self._waiting.pop(route.key, None)
                route.dispatch()  # which holds it again where there is still no place
        self._tell_watchers()

    def _end_all(self) -> None:
        """Every request has its terminal event with this, without a word from the replicas."""
        for route in list(self._routes.values()):
            route.end_now("shutdown")

    def _tell_watchers(self) -> None:
        waiting, running = self._count()
        self._recorder.changed(queue_depth=waiting, running=running)

    def _count(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        waiting = sum(route.waiting for route in self._routes.values())
        return waiting, len(self._routes) - waiting

    async def _wait_ended(self, at_most_s: float, live: Callable[[], int]) -> None:
        with trio.move_on_after(at_most_s):
            while live():
                await self._ended.park()
