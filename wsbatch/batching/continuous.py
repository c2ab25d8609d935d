"""Iteration-level batching: after every step finished rows leave and waiting ones join.

The schedule is Sarathi-Serve's (Agrawal et al., OSDI 2024): every running row decodes in every step, and prompts are
prefilled in chunks beside the decodes. Where Sarathi counts all tokens of a step against one budget, decodes here count
against none (`max_batch_size` bounds them): the prompt tokens of a step are at most `prefill_chunk_tokens` while any
row decodes, and at most `max_batch_prefill_tokens` while none does. The longest gap between two tokens of a stream is
therefore one decode step plus one chunk, whatever arrives. Tokens recomputed after a preemption are prompt tokens in
this sense. Blocks, and who gives way when they run out, are the business of `rows`.
"""

from collections.abc import Sequence

from wsbatch.batching.accounting import Ledger, RowReport
from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.costs import StepCost
from wsbatch.batching.prefill import PrefillBudget
from wsbatch.batching.queue import ScheduledRequest, WaitingQueue
from wsbatch.batching.rows import Row, Rows
from wsbatch.batching.scheduler import PROBE, CacheStats, Decision, Idle, Release, RowToken, Step, StepOutcome
from wsbatch.messages import RowPhase, SamplingParams
from wsbatch.steps import PagedRow, PagedStep, StepResult


class ContinuousScheduler:
    """Implements `Scheduler`. Never answers `WaitUntil`: joining costs one step, so waiting only hurts.

    Dispatch is strictly in order: when a request starts or comes back, nobody waits with a smaller
    `ScheduledRequest.order` waits. A request that does not fit yet holds up those behind it: that keeps long ones from
    starving. In a step that preempts, nobody starts or comes back.

    Between two steps a row's blocks may be replaced, not only appended to: after a preemption, or where a block turned
    out to be known to the prefix index already.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_prefill_tokens: int,
        prefill_chunk_tokens: int,
        pool: BlockPool,
        itl_slo_s: float | None = None,
        max_step_s: float | None = None,
    ) -> None:
        """`itl_slo_s` and `max_step_s` bound the prompt tokens of a step further: see `PrefillBudget`.

        ValueError: a value out of bounds.
        """
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("prefill_chunk_tokens", prefill_chunk_tokens, 1),
            ("max_batch_prefill_tokens", max_batch_prefill_tokens, prefill_chunk_tokens),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}: must be at least {least}")
        self.queue = WaitingQueue()  # requests that never ran; the preempted are not among them
        self.ledger = Ledger()
        self.pool = pool
        self.prefill_budget = PrefillBudget(
            most_tokens=max_batch_prefill_tokens,
            chunk_tokens=prefill_chunk_tokens,
            block_tokens=pool.block_tokens,
            costs=self.ledger.costs,
            itl_slo_s=itl_slo_s,
            max_step_s=max_step_s,
        )
        self._max_batch_size = max_batch_size
        self._block_tokens = pool.block_tokens
        self._rows = Rows(pool)
        self._live: dict[int, Row] = {}
        self._flight: list[Row] = []  # the rows of the step in flight, in plan order
        self._head: Row | None = None  # made of the first in the queue, kept while that has no room
        self._releases: list[Release] = []

    def __repr__(self) -> str:
        return (
            f"<ContinuousScheduler {len(self.queue)} waiting, {len(self._rows.running)} running, "
            f"{len(self._rows.preempted)} preempted, {len(self._flight)} rows in flight, {self.pool!r}>"
        )

    @property
    def running(self) -> int:
        """Live requests past the queue, the preempted included."""
        return len(self._live)

    @property
    def preemptions(self) -> int:
        """How often a row was preempted."""
        return self._rows.preemptions

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus `max_new_tokens` of a request at most: what the pool holds. Longer ones are refused."""
        return self.pool.total * self._block_tokens

    def add(self, request: ScheduledRequest) -> None:
        """Put the request in the queue. ValueError where it is empty or longer than `max_request_tokens`."""
        if not request.token_ids:
            raise ValueError(f"request {request.key} has 0 prompt tokens: must be at least 1")
        length = len(request.token_ids) + request.max_new_tokens
        if length > self.max_request_tokens:
            raise ValueError(f"request {request.key} has {length} tokens: must be at most {self.max_request_tokens}")
        self.queue.add(request)

    def decide(self, now_s: float) -> Decision:
        """One step: the decodes, then the next chunks of running prefills, then requests that start or come back."""
        if self._flight:
            raise RuntimeError(f"{self!r}: decide was called while a step is in flight")
        preemptions = self._rows.preemptions
        decoding, prefilling = self._rows.decoding(), self._rows.prefilling()
        plan = self._plan_decodes(decoding)
        started: list[int] = []
        if prefilling or self._rows.preempted or len(self.queue):
            budget = self.prefill_budget.tokens(decode_rows=len(decoding))
            budget -= self._plan_chunks(prefilling, budget, plan)
            if self._rows.preemptions == preemptions:
                started = self._let_in(budget, plan)
        self._flight = [row for row in plan if row.planned]  # some were preempted after they were planned
        if self._flight:
            return Step(PagedStep(tuple([_paged_row(row) for row in self._flight])), tuple(started))
        self._check_idle()
        return Idle()

    def complete(self, result: StepResult, now_s: float) -> StepOutcome:
        """Take the step's tokens, and let the prefix index know the blocks it filled. ValueError: not one a sample."""
        flight, self._flight = self._flight, []
        cost = _cost(flight, result.model_ms / 1000)
        sampling = [row for row in flight if row.computed + row.planned == len(row.tokens)]
        for row in flight:
            self._rows.advance(row)
        tokens = _take(sampling, result)
        self.ledger.record(cost, [row.request.key for row in flight if not row.ended])
        self.prefill_budget.record(cost)
        return StepOutcome(tokens, cost)

    def abort(self, now_s: float) -> tuple[int, ...]:
        """Nobody knows what the step wrote: its rows are gone, and none of the blocks it filled is remembered."""
        flight, self._flight = self._flight, []
        for row in flight:
            row.planned = 0
            if row.ended:
                self._rows.free(row)
        keys = tuple(row.request.key for row in flight if not row.ended)
        for key in keys:
            self.end(key, now_s)
        return keys

    def probe(self, token_ids: tuple[int, ...]) -> PagedStep | None:
        """In a block that nobody uses: the next to take it writes it before it reads it."""
        if not self.pool.available:
            return None
        table = self.pool.allocate(1)
        self.pool.release(table)
        return PagedStep((PagedRow(PROBE, token_ids[: self._block_tokens], 0, table, SamplingParams()),))

    def end(self, key: int, now_s: float) -> None:
        """The request leaves at once; blocks that the step in flight writes to are freed after it."""
        if self.queue.remove(key) is not None:
            return
        row = self._live.pop(key, None)
        if row is not None:
            self._rows.leave(row)
            self._releases.append(Release(key, 0.0, self.ledger.leave(key)))

    def slot_phases(self) -> Sequence[tuple[int, RowPhase]]:
        """The running rows. `held` is one whose prompt waits for its next chunk, or that waits for a block."""
        return [
            (row.request.key, "held" if not row.planned else "prefill" if row.computed < row.prompt_end else "decode")
            for row in self._rows.running
        ]

    def releases(self) -> Sequence[Release]:
        """Requests that ran and ended since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def report(self, key: int) -> RowReport | None:
        """What the steps since it started have cost."""
        return self.ledger.report(key)

    def request(self, key: int) -> ScheduledRequest | None:
        """The request, waiting or running."""
        row = self._live.get(key)
        return self.queue.get(key) if row is None else row.request

    def cache(self) -> CacheStats:
        """The KV pool's numbers."""
        pool = self.pool
        return CacheStats(
            used_blocks=pool.used,
            total_blocks=pool.total,
            queried_tokens=pool.queried_tokens,
            hit_tokens=pool.hit_tokens,
            evictions=pool.evictions,
            preemptions=self.preemptions,
        )

    def check(self) -> None:
        """Raise RuntimeError unless every block is accounted for."""
        ended = [row for row in self._flight if row.ended]
        self.pool.check([row.table for row in self._rows.running + ended])

    def _plan_decodes(self, decoding: list[Row]) -> list[Row]:
        """One token for each of these rows that has a block for it, or gets one."""
        plan = []
        for row in decoding:
            # without a table it was preempted a moment ago, by a row before it
            if row.computed < len(row.table) * self._block_tokens or (row.table and self._rows.grow(row, 1)):
                row.planned = 1
                plan.append(row)
        return plan

    def _plan_chunks(self, prefilling: list[Row], budget: int, plan: list[Row]) -> int:
        """Add to the plan the next chunk of each of these rows, until the budget is spent; how much of it was."""
        spent = 0
        for row in prefilling:
            if spent < budget and row.table:
                self._plan_chunk(row, budget - spent, plan)
                spent += row.planned
        return spent

    def _let_in(self, budget: int, plan: list[Row]) -> list[int]:
        """Add to the plan requests that start or come back, until the budget is spent; the keys of those that start.

        With budget left, every running prompt is planned to its end and has its blocks, or there are none at all.
        """
        started = []
        while budget and len(self._rows.running) < self._max_batch_size:
            candidate = self._candidate()
            if candidate is None or not self._rows.enter(candidate):
                break
            if candidate.request.key not in self._live:
                self._start(candidate)
                started.append(candidate.request.key)
            self._plan_chunk(candidate, budget, plan)
            budget -= candidate.planned
        return started

    def _plan_chunk(self, row: Row, budget: int, plan: list[Row]) -> None:
        row.planned = self._rows.grow(row, min(budget, row.prompt_end - row.computed))
        plan.append(row)

    def _check_idle(self) -> None:
        # `check` finds out more, but looks at every block: too long for an event loop where the pool is large
        if not self._live and self.pool.used:
            raise RuntimeError(f"{self!r}: nobody is live and blocks are in use")

    def _candidate(self) -> Row | None:
        """Whoever is next in order among the preempted and the queue."""
        waiting = next(iter(self.queue), None)
        preempted = self._rows.preempted
        if preempted and (waiting is None or preempted[0].order < waiting.order):
            return preempted[0]
        if waiting is None:
            return None
        if self._head is None or self._head.request is not waiting:
            self._head = Row(waiting)
        return self._head

    def _start(self, row: Row) -> None:
        """The row's first step: it leaves the queue."""
        key = row.request.key
        self.queue.remove(key)
        self._head = None
        self._live[key] = row
        self.ledger.join(key, cached_tokens=row.computed)
        self.pool.count_lookup(row.prompt_end, row.computed)


def _paged_row(row: Row) -> PagedRow:
    end = row.computed + row.planned
    ids = tuple(row.tokens[row.computed : end])
    sampling = row.request.sampling if end == len(row.tokens) else None
    return PagedRow(row.request.key, ids, row.computed, row.table, sampling)


def _cost(flight: list[Row], seconds: float) -> StepCost:
    """What the step in flight has computed, before its rows advance. Of a row that ended, nothing is useful."""
    prefilled = useful_prefilled = decoded = useful_decoded = 0
    for row in flight:
        fresh = row.computed + row.planned - row.furthest
        useful = 0 if row.ended or fresh < 0 else fresh
        if row.computed < row.prompt_end:
            prefilled += row.planned
            useful_prefilled += useful
        else:
            decoded += 1
            useful_decoded += useful
    return StepCost(len(flight), prefilled, useful_prefilled, decoded, useful_decoded, seconds)


def _take(sampling: list[Row], result: StepResult) -> tuple[RowToken, ...]:
    """Append to each row that sampled its token; the tokens of those whose request is still there."""
    tokens = []
    logprobs = result.logprobs or (None,) * len(result.token_ids)
    for row, token_id, token_logprobs in zip(sampling, result.token_ids, logprobs, strict=True):
        if not row.ended:
            row.tokens.append(token_id)
            tokens.append(RowToken(row.request.key, token_id, token_logprobs))
    return tuple(tokens)
