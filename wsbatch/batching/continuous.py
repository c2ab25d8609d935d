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
from wsbatch.batching.costs import PrefillBound, StepCost, choose_chunk
from wsbatch.batching.queue import WaitingQueue, Work
from wsbatch.batching.rows import Row, Rows
from wsbatch.batching.scheduler import PROBE, CacheStats, Decision, Idle, Release, RowToken, Step, StepOutcome
from wsbatch.messages import RowPhase, SamplingParams
from wsbatch.steps import PagedRow, PagedStep, StepResult

_TUNE_STEPS = 16


class ContinuousScheduler:
    """Implements `Scheduler`. Never answers `WaitUntil`: joining costs one step, so waiting only hurts.

    Dispatch is strictly in order: when a request starts or comes back, nobody waits whose `Work.order` is smaller. A
    request that does not fit yet holds up those behind it; that is what keeps long ones from starving. In a step that
    preempts, nobody starts or comes back.

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
        max_preemptions: int = 3,
        itl_slo_s: float | None = None,
        max_step_s: float | None = None,
    ) -> None:
        """`itl_slo_s`: the goal for a step that decodes; the chunk then follows from the costs of the steps so far.

        `max_step_s`: no step is given more prompt tokens than it can compute in this time, as far as the steps so far
        tell; the first ones are small. None: there is no such bound.
        `max_preemptions` 0 reserves each request's whole length at admission. ValueError: a value out of bounds.
        """
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("prefill_chunk_tokens", prefill_chunk_tokens, 1),
            ("max_batch_prefill_tokens", max_batch_prefill_tokens, prefill_chunk_tokens),
            ("max_preemptions", max_preemptions, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}: must be at least {least}")
        self.queue = WaitingQueue()  # requests that never ran; the preempted are not among them
        self.ledger = Ledger()
        self.pool = pool
        self._max_batch_size = max_batch_size
        self._max_batch_prefill_tokens = max_batch_prefill_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self._itl_slo_s = itl_slo_s
        self._bound = None if max_step_s is None else PrefillBound(max_step_s, self.ledger.costs)
        self._block_tokens = pool.block_tokens
        self._rows = Rows(pool, max_preemptions)
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

    def add(self, work: Work) -> None:
        """Put the request in the queue. ValueError where it is empty or longer than `max_request_tokens`."""
        if not work.token_ids:
            raise ValueError(f"request {work.key} has 0 prompt tokens: must be at least 1")
        length = len(work.token_ids) + work.max_new_tokens
        if length > self.max_request_tokens:
            raise ValueError(f"request {work.key} has {length} tokens: must be at most {self.max_request_tokens}")
        self.queue.add(work)

    def decide(self, now_s: float) -> Decision:
        """One step: the decodes, then the next chunks of running prefills, then requests that start or come back."""
        if self._flight:
            raise RuntimeError(f"{self!r}: decide was called while a step is in flight")
        rows = self._rows
        preemptions = rows.preemptions
        decodes = [row for row in rows.running if row.computed >= row.prompt_end and len(row.tokens) < row.limit]
        prefills = [row for row in rows.running if row.computed < row.prompt_end]
        plan: list[Row] = []
        for row in decodes:
            # without a table it was preempted a moment ago, by a row before it
            if row.computed < len(row.table) * self._block_tokens or (row.table and rows.grow(row, 1)):
                row.planned = 1
                plan.append(row)
        budget = self.prefill_chunk_tokens if decodes else self._max_batch_prefill_tokens
        if self._bound is not None and (prefills or rows.preempted or len(self.queue)):
            budget = min(budget, self._bound.tokens(decode_rows=len(decodes)))
        for row in prefills:
            if budget and row.table:
                row.planned = rows.grow(row, min(budget, row.prompt_end - row.computed))
                budget -= row.planned
                plan.append(row)
        started: list[int] = []
        # with budget left, every running prompt is planned to its end and has its blocks, or there are none at all
        while budget and len(rows.running) < self._max_batch_size and rows.preemptions == preemptions:
            candidate = self._candidate()
            if candidate is None or not rows.enter(candidate):
                break
            if candidate.work.key not in self._live:
                self._start(candidate)
                started.append(candidate.work.key)
            candidate.planned = rows.grow(candidate, min(budget, candidate.prompt_end - candidate.computed))
            budget -= candidate.planned
            plan.append(candidate)
        self._flight = [row for row in plan if row.planned]  # some were preempted after they were planned
        if self._flight:
            return Step(PagedStep(tuple([_paged_row(row) for row in self._flight])), tuple(started))
        if not self._live and self.pool.used:
            # `check` finds out more, but looks at every block: too long for an event loop where the pool is large
            raise RuntimeError(f"{self!r}: nobody is live and blocks are in use")
        return Idle()

    def complete(self, result: StepResult, now_s: float) -> StepOutcome:
        """Take the step's tokens, and let the prefix index know the blocks it filled. ValueError: not one a sample."""
        flight, self._flight = self._flight, []
        sampling: list[Row] = []
        keys: list[int] = []
        prefilled = useful_prefilled = decoded = useful_decoded = 0
        for row in flight:
            prompt = row.computed < row.prompt_end
            if prompt:
                prefilled += row.planned
            else:
                decoded += 1
            row.computed += row.planned
            row.planned = 0
            if row.computed == len(row.tokens):
                sampling.append(row)
            if row.ended:  # perhaps because the step failed for it: what it wrote is not to be remembered
                self._rows.free(row)
                continue
            if row.computed >= (row.published + 1) * self._block_tokens:
                self._rows.publish(row)
            keys.append(row.work.key)
            if row.computed > row.furthest:
                if prompt:
                    useful_prefilled += row.computed - row.furthest
                else:
                    useful_decoded += 1
                row.furthest = row.computed
        tokens: list[RowToken] = []
        logprobs = result.logprobs or (None,) * len(result.token_ids)
        for row, token_id, token_logprobs in zip(sampling, result.token_ids, logprobs, strict=True):
            if not row.ended:
                row.tokens.append(token_id)
                tokens.append(RowToken(row.work.key, token_id, token_logprobs))
        seconds = result.model_ms / 1000
        cost = StepCost(len(flight), prefilled, useful_prefilled, decoded, useful_decoded, seconds)
        self.ledger.record(cost, keys)
        if self._bound is not None:
            self._bound.record(cost)
        if self._itl_slo_s is not None and self.ledger.steps % _TUNE_STEPS == 0:
            self._tune(self._itl_slo_s)
        return StepOutcome(tuple(tokens), cost)

    def abort(self, now_s: float) -> tuple[int, ...]:
        """Nobody knows what the step wrote: its rows are gone, and none of the blocks it filled is remembered."""
        flight, self._flight = self._flight, []
        for row in flight:
            row.planned = 0
            if row.ended:
                self._rows.free(row)
        keys = tuple(row.work.key for row in flight if not row.ended)
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
            (row.work.key, "held" if not row.planned else "prefill" if row.computed < row.prompt_end else "decode")
            for row in self._rows.running
        ]

    def releases(self) -> Sequence[Release]:
        """Requests that ran and ended since the last call."""
        releases, self._releases = self._releases, []
        return releases

    def report(self, key: int) -> RowReport | None:
        """What the steps since it started have cost."""
        return self.ledger.report(key)

    def work(self, key: int) -> Work | None:
        """The request, waiting or running."""
        row = self._live.get(key)
        return self.queue.get(key) if row is None else row.work

    def cache(self) -> CacheStats:
        """The KV pool's numbers."""
        pool = self.pool
        return CacheStats(
            used_blocks=pool.used,
            cached_blocks=pool.cached,
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

    def _tune(self, itl_slo_s: float) -> None:
        """Choose the chunk anew: costs drift with the contexts' lengths and with the machine."""
        costs = self.ledger.costs.fitted()
        if costs is None or not costs.beta_s:
            return
        decodes = sum(row.computed >= row.prompt_end for row in self._rows.running)
        try:
            chunk = choose_chunk(itl_slo_s, costs, rows=decodes, block_tokens=self._block_tokens)
        except ValueError:  # the decodes alone take longer: admission refuses newcomers, prompts go on by the block
            chunk = self._block_tokens
        self.prefill_chunk_tokens = min(chunk, self._max_batch_prefill_tokens)

    def _candidate(self) -> Row | None:
        """Whoever is next in order among the preempted and the queue."""
        waiting = next(iter(self.queue), None)
        preempted = self._rows.preempted
        if preempted and (waiting is None or preempted[0].order < waiting.order):
            return preempted[0]
        if waiting is None:
            return None
        if self._head is None or self._head.work is not waiting:
            self._head = Row(waiting)
        return self._head

    def _start(self, row: Row) -> None:
        """The row's first step: it leaves the queue."""
        key = row.work.key
        self.queue.remove(key)
        self._head = None
        self._live[key] = row
        self.ledger.join(key, cached_tokens=row.computed)
        self.pool.count_lookup(row.prompt_end, row.computed)


def _paged_row(row: Row) -> PagedRow:
    end = row.computed + row.planned
    ids = tuple(row.tokens[row.computed : end])
    sampling = row.work.sampling if end == len(row.tokens) else None
    return PagedRow(row.work.key, ids, row.computed, row.table, sampling)
