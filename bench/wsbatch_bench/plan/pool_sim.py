"""A pool of replicas as discrete events: the real schedulers and the real placing, without sockets, frames or tasks.

The whole server in virtual time (`virtual`) spends most of a CPU's time on frames and tasks, which take no virtual time
at all: they do not change when anything happens. Here only what decides is run: `wsbatch.batching` for each replica,
`wsbatch.pool.placement` for each router, and the simulated model's step costs. One token costs about 6 µs of CPU.

A router knows of a replica what that one said last (`status_interval_ms`) and what the router itself sent there since;
of what other routers sent it hears at the next question. Left out: the time of frames on the way, the CPU time of
servers and routers, and the prefix index (prompts of a trace share no beginning).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

from wsbatch.batching.accounting import Ledger
from wsbatch.batching.costs import CostModel
from wsbatch.batching.scheduler import Idle, Step, WaitUntil
from wsbatch.config import EngineConfig, PoolConfig
from wsbatch.engine.open import make_scheduler
from wsbatch.messages import GenerateRequest, SamplingParams
from wsbatch.model.simulated import SimulatedModel
from wsbatch.pool.needs import estimated_tokens
from wsbatch.pool.placement import choose
from wsbatch.steps import PaddedDecode, PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch_bench.load.generator import CLOSED_START_S, STOPPED, LoadPlan, LoadRun
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerTotals
from wsbatch_bench.load.trace import Planned
from wsbatch_bench.stability import hopeless, judge
from wsbatch_bench.steps.bare_loop import BareEngine, LoopRequest
from wsbatch_bench.sweep.setting import Costs, Setting

_ASK_EVERY_S = PoolConfig().status_interval_ms / 1000
_LOOKS = 10  # at the stability, for as many requests as are measured
_NO_TOKENS = (0,) * 4096  # max_batch_size at most


class EventReplica:
    """One engine without its event loop. `schedule` calls back at a time; `ended` is told of each request's end.

    `EngineCore` in the place of `BareEngine` gives the same figures, but takes 1.8 times as long (8.5 µs of CPU a token
    instead of 4.7): it makes text, events and metrics, which nobody reads here.
    """

    def __init__(
        self,
        config: EngineConfig,
        costs: CostModel,
        *,
        schedule: Callable[[float, Callable[[float], None]], None],
        ended: Callable[[Record, float], None],
    ) -> None:
        self._engine = BareEngine(make_scheduler(config, now_s=0.0))
        self.work_tokens = 0  # as `EngineCore.status` counts them: prompt and output of what waits, output of what runs
        self._config = config
        self._model = SimulatedModel(costs, block_tokens=config.block_tokens)
        self._schedule = schedule
        self._tell_end = ended
        self._records: dict[int, Record] = {}
        self._stepping = False
        self._padded: tuple[int, ...] = ()  # rows of the batch that runs, the dropped ones left out

    @property
    def ledger(self) -> Ledger:
        """The sums of all its steps."""
        return self._engine.scheduler.ledger

    @property
    def full(self) -> bool:
        """Whether one more request would be refused."""
        queue = self._engine.scheduler.queue
        return len(queue) >= self._config.max_queue_requests or queue.tokens >= self._config.max_queue_tokens

    def add(self, request: GenerateRequest, record: Record, now_s: float) -> None:
        """Take a request."""
        assert request.token_ids is not None
        new_tokens = request.sampling.most_tokens
        self._engine.add(record.index, LoopRequest(request.token_ids, new_tokens), arrived_s=now_s)
        self._records[record.index] = record
        self.work_tokens += len(request.token_ids) + new_tokens
        if not self._stepping:
            self._turn(now_s)

    def _turn(self, now_s: float) -> None:
        """As `BatchEngine._turn`: decide, and step or wait. What wakes a wait too early only makes it decide again."""
        if self._stepping:
            return
        match self._engine.next(now_s):
            case Step(plan=plan, started=started):
                self._stepping = True
                self.work_tokens -= sum(self._records[key].prompt_tokens for key in started)
                result = self._compute(plan)
                self._schedule(now_s + result.model_ms / 1000, lambda ended_s: self._ended(result, ended_s))
            case WaitUntil(at_s=at_s):
                self._schedule(max(at_s, now_s), self._turn)
            case Idle():
                pass

    def _compute(self, plan: StepPlan) -> StepResult:
        """A step's time, and zeros for its tokens: nobody looks at them, and they cost more to make than all else."""
        match plan:
            case PagedStep(rows=rows):
                sampled = sum(row.sampling is not None for row in rows)
            case PaddedStart(rows=padded):
                self._padded = tuple(range(len(padded)))
                sampled = len(padded)
            case PaddedDecode(keep=keep):
                if keep is not None:
                    self._padded = tuple(range(len(keep)))
                plan = PaddedDecode(self._padded)
                sampled = len(self._padded)
        return StepResult(_NO_TOKENS[:sampled], None, 1000 * self._model.step_s(plan))

    def _ended(self, result: StepResult, now_s: float) -> None:
        self._stepping = False
        turn = self._engine.complete(result, now_s)
        self.work_tokens -= len(turn.outcome.tokens)
        for key in turn.first:
            self._records[key].arrivals.append((now_s, 1))
        for key in turn.ended:
            record = self._records.pop(key)
            if record.output_tokens > 1:
                record.arrivals.append((now_s, record.output_tokens - 1))
            record.reported_tokens, record.ended_s = record.output_tokens, now_s
            self._tell_end(record, now_s)
        self._turn(now_s)


@dataclass(slots=True)
class _Router:
    """What one router knows: each replica's work, in the order in which equals are chosen (see `EnginePool.place`)."""

    work_tokens: dict[EventReplica, int] = field(default_factory=dict)

    def place(self, request: GenerateRequest) -> EventReplica | None:
        """The replica for it; None where all are full. One that refuses is left out: the next is asked at once."""
        work = self.work_tokens
        if any(replica.full for replica in work):
            work = {replica: tokens for replica, tokens in work.items() if not replica.full}
            if not work:
                return None
        chosen = choose(work, None, slack_tokens=0)
        self.work_tokens[chosen] = self.work_tokens.pop(chosen) + estimated_tokens(request)
        return chosen


class _Simulation:
    """One run of a plan."""

    def __init__(self, config: EngineConfig, costs: CostModel, plan: LoadPlan, *, replicas: int, routers: int) -> None:
        self.load = LoadRun(plan)
        self._plan = plan
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._replicas = [EventReplica(config, costs, schedule=self._at, ended=self._ended) for _ in range(replicas)]
        self._routers = [_Router(dict.fromkeys(self._replicas, 0)) for _ in range(routers)]
        self._rng = random.Random(f"{plan.trace.seed}/pool")
        self._closed = plan.trace.closed
        self._arrivals = plan.trace.schedule(1.0 if self._closed else plan.rate)
        self._left = plan.measured  # measured requests that have not ended
        self._before = ServerTotals()
        self._over = False

    def run(self) -> LoadRun:
        """Until the last measured request has ended, or the pool has fallen behind beyond doubt."""
        if len(self._replicas) > 1:
            for router in self._routers:
                for replica in self._replicas:
                    # Each began to ask at a time of its own.
                    self._at(self._rng.uniform(0, _ASK_EVERY_S), partial(self._ask, router, replica))
        self._begin()
        while not self._over:
            now_s, _, act = heappop(self._events)
            act(now_s)
        for record in self.load.records:
            if not record.ok and record.error is None:
                record.error = STOPPED
        return self.load

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), act))

    def _ask(self, router: _Router, replica: EventReplica, now_s: float) -> None:
        """The answer knows of everything that was sent: nothing is ever on the way here."""
        router.work_tokens[replica] = replica.work_tokens
        self._at(now_s + _ASK_EVERY_S, partial(self._ask, router, replica))

    def _begin(self) -> None:
        """The first request of an open loop; of a closed one, the first of each client, one after the other."""
        if self._closed is None:
            self._arrive_next()
            return
        for number in range(self._closed.clients):
            self._at(number / self._closed.clients * CLOSED_START_S, self._ask_again)

    def _arrive_next(self) -> None:
        planned = next(self._arrivals)
        self._at(planned.at_s, partial(self._arrive, planned))

    def _ask_again(self, now_s: float) -> None:
        """A client of a closed loop has its answer."""
        assert self._closed is not None
        self._at(now_s + self._closed.think_s, partial(self._arrive, next(self._arrivals)))

    def _arrive(self, planned: Planned, now_s: float) -> None:
        record = Record(planned.index, planned.prompt_tokens, planned.output_tokens, now_s, now_s)
        self.load.records.append(record)
        if planned.index == self._plan.warmup:
            self.load.window_s = (now_s, inf)
            self._before = self._totals()
        request = GenerateRequest(
            token_ids=(0,) * planned.prompt_tokens, sampling=SamplingParams(max_tokens=planned.output_tokens)
        )
        replica = self._rng.choice(self._routers).place(request)
        if replica is None:
            record.failed("queue_full", now_s)
            self._ended(record, now_s)
        else:
            replica.add(request, record, now_s)
        # Not before all measured ones are there: over a few seconds the ups and downs of a pool look like a trend.
        late = planned.index - self._plan.warmup - self._plan.measured
        if self._plan.stop_unstable and late >= 0 and late % max(1, self._plan.measured // _LOOKS) == 0:
            self._look(now_s)
        if self._closed is None:
            self._arrive_next()

    def _look(self, now_s: float) -> None:
        if hopeless(judge(self.load.sojourns, self.load.window_s[0], now_s)):
            self.load.stopped_early = True
            self._close(now_s)

    def _ended(self, record: Record, now_s: float) -> None:
        if self._plan.warmup <= record.index < self._plan.warmup + self._plan.measured:
            self._left -= 1
            if not self._left:
                self._close(now_s)
        if self._closed is not None:
            # Who was refused does not ask again at once: it would be refused for ever.
            self._at(now_s if record.ok else now_s + CLOSED_START_S, self._ask_again)

    def _close(self, now_s: float) -> None:
        self.load.window_s = (self.load.window_s[0], now_s)
        self.load.window_totals = self._totals().since(self._before)
        self._over = True

    def _totals(self) -> ServerTotals:
        """The ledgers' sums."""
        ledgers = [replica.ledger for replica in self._replicas]
        issued, useful = (
            {
                phase: sum(getattr(getattr(ledger, phase), f"{what}_tokens") for ledger in ledgers)
                for phase in ("prefill", "decode")
            }
            for what in ("issued", "useful")
        )
        return ServerTotals(
            issued_tokens=issued,
            useful_tokens=useful,
            steps=sum(ledger.steps for ledger in ledgers),
            rows=sum(ledger.rows for ledger in ledgers),
        )


@dataclass(frozen=True)
class PoolStage:
    """A pool of equal replicas behind routers, as a `Stage`: discrete events, deterministic.

    Attributes:
        costs: of a step, by scheduler.
        replicas: how many; at least 1.
        routers: among which clients are spread at random.
    """

    costs: Costs
    replicas: int = 1
    routers: int = 1
    name = "virtual"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Raises ValueError for a request that no replica can hold."""
        costs = self.costs[setting.scheduler]
        config = setting.config(model="simulated")
        return _Simulation(config, costs, plan, replicas=self.replicas, routers=self.routers).run()
