"""The rows of continuous batching and the KV blocks they hold: who may grow, who must give way.

KV memory is taken block by block. Where a row needs a block and there is none, the least urgent row behind it is
preempted: its blocks are freed, and it comes back at its old place in the order and prefills its prompt and output anew
(vLLM's recomputation). A row with nobody behind it keeps what it has and waits a step: to preempt itself would
free its blocks for nobody.

Why this never locks up: of the running rows the most urgent may take from all others, and a request alone fits the
pool. Only from rows that were preempted MAX_PREEMPTIONS times nothing may be taken. Such a row comes back only when
its whole length fits beside the whole lengths of its like, and may itself take from everyone else. So in each step
there is room for a token of the most urgent row, or of one of those.
"""

import bisect

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.queue import ScheduledRequest

MAX_PREEMPTIONS = 3
"""How often a row is preempted at most."""


class Row:
    """A request past the queue: running while it holds blocks, preempted while it holds none.

    Attributes:
        request: the request.
        order: its `ScheduledRequest.order`.
        tokens: prompt and output so far.
        limit: how long `tokens` may get.
        prompt_end: prefilling up to this position; after a preemption that includes output.
        table: its blocks.
        computed: positions whose KV is in them.
        furthest: positions whose KV was there at some time; up to here computing is recomputation.
        published: leading blocks that the prefix index knows.
        planned: tokens in the step that is being planned or in flight.
        preemptions: how often it was preempted.
        ended: it is over, but the step in flight still writes to its blocks.
    """

    __slots__ = (
        "computed",
        "ended",
        "furthest",
        "limit",
        "order",
        "planned",
        "preemptions",
        "prompt_end",
        "published",
        "request",
        "table",
        "tokens",
    )

    def __init__(self, request: ScheduledRequest) -> None:
        self.request = request
        self.order = request.order
        self.tokens = list(request.token_ids)
        self.limit = len(self.tokens) + request.max_new_tokens
        self.prompt_end = len(self.tokens)
        self.table: tuple[int, ...] = ()
        self.computed = self.furthest = self.published = self.planned = self.preemptions = 0
        self.ended = False

    @property
    def protected(self) -> bool:
        """Whether nothing may be taken from it any more."""
        return self.preemptions >= MAX_PREEMPTIONS

    def __repr__(self) -> str:
        return f"<Row {self.request.key}: {self.computed}/{len(self.tokens)} tokens in blocks {self.table}>"


class Rows:
    """The running and the preempted rows.

    Attributes:
        running: most urgent first.
        preempted: most urgent first.
        preemptions: how often a row was preempted.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.running: list[Row] = []
        self.preempted: list[Row] = []
        self.preemptions = 0
        self._pool = pool
        self._block_tokens = pool.block_tokens
        self._reserved = 0  # blocks that the protected of the running rows need at their full lengths

    def decoding(self) -> list[Row]:
        """The running rows that may generate one more token, most urgent first."""
        return [row for row in self.running if row.computed >= row.prompt_end and len(row.tokens) < row.limit]

    def prefilling(self) -> list[Row]:
        """The running rows whose prompt is not computed to its end, most urgent first."""
        return [row for row in self.running if row.computed < row.prompt_end]

    def enter(self, row: Row) -> bool:
        """Let this row run, with the blocks of its known prefix, if there is room for it; it may be a preempted one.

        Room is blocks for its whole prompt, though they are taken chunk by chunk; and, unless nothing runs, one more
        block for it and for each running row. Without that watermark a newcomer, the likeliest victim, might be
        preempted in the next step; with it no row runs out of blocks within the next `block_tokens` steps. Call it only
        once each running prompt has the blocks it needs: otherwise room is counted twice.
        """
        pool = self._pool
        room = pool.available
        if self.running:
            room -= len(self.running) + 1
            if room < 1:
                return False  # one block is missing whatever the index knows: spare the look-up in every step
        if row.protected and self._reserved + self._full_blocks(row) > pool.total:
            return False
        blocks, cached_tokens = pool.match_prefix(row.tokens)
        before = pool.available
        pool.acquire(blocks)
        room -= before - pool.available  # blocks of the prefix that were cached: they were counted as room
        if room < self._blocks_for(row.prompt_end) - len(blocks):
            pool.release(blocks)
            return False
        row.table, row.published, row.computed = blocks, len(blocks), cached_tokens
        row.furthest = max(row.furthest, cached_tokens)
        if row.preemptions:
            self.preempted.remove(row)
        bisect.insort(self.running, row, key=_order)
        if row.protected:
            self._reserved += self._full_blocks(row)
        return True

    def leave(self, row: Row) -> None:
        """The row is over. Its blocks are freed, unless a step in flight writes to them: see `free`."""
        if not row.table:
            self.preempted.remove(row)
            return
        self.running.remove(row)
        if row.protected:
            self._reserved -= self._full_blocks(row)
        row.ended = row.planned > 0
        if not row.ended:
            self.free(row)

    def free(self, row: Row) -> None:
        """Give back the blocks of a row that is not running any more."""
        self._pool.release(row.table)
        row.table = ()

    def grow(self, row: Row, wanted: int) -> int:
        """Blocks for the row's next `wanted` tokens, or for as many as there is room for; that number.

        Rows are preempted only where not even one token has room. 0: none may be, the row must wait.
        """
        spare = len(row.table) * self._block_tokens - row.computed
        while not spare and not self._pool.available:
            victim = self._victim(row)
            if victim is None:
                return 0
            self._preempt(victim)
        missing = self._blocks_for(row.computed + wanted) - len(row.table)
        if missing > 0:
            row.table += self._pool.allocate(min(missing, self._pool.available))
        return min(wanted, len(row.table) * self._block_tokens - row.computed)

    def advance(self, row: Row) -> None:
        """What was planned for the row is computed. Where it has ended in the meantime, nothing of it is remembered."""
        row.computed += row.planned
        row.planned = 0
        if row.ended:
            self.free(row)
            return
        if row.computed > row.furthest:
            row.furthest = row.computed
        if row.computed >= (row.published + 1) * self._block_tokens:
            self._publish(row)

    def _publish(self, row: Row) -> None:
        """Tell the prefix index the blocks that the row has filled; each is hashed once."""
        size, table = self._block_tokens, list(row.table)
        while row.computed >= (row.published + 1) * size:
            index = row.published
            content = tuple(row.tokens[index * size : (index + 1) * size])
            table[index] = self._pool.publish(table[index], table[index - 1] if index else None, content)
            row.published += 1
        row.table = tuple(table)

    def _victim(self, row: Row) -> Row | None:
        """The least urgent row behind this one that may be preempted; of all rows, where this one may not be."""
        for other in reversed(self.running):
            if other is row:
                if not row.protected:
                    return None
            elif not other.protected:
                return other
        return None

    def _preempt(self, row: Row) -> None:
        self.running.remove(row)
        bisect.insort(self.preempted, row, key=_order)
        self.free(row)
        row.computed = row.published = row.planned = 0
        row.prompt_end = len(row.tokens)
        row.preemptions += 1
        self.preemptions += 1

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _full_blocks(self, row: Row) -> int:
        return self._blocks_for(row.limit - 1)  # nothing comes after the last token, so its KV is never written


def _order(row: Row) -> tuple[float, int]:
    return row.order
