"""The continuous scheduler over random traces, against a model whose KV memory remembers what was written where.

The oracle plays engine and model: it runs every plan on a dict of KV slots, each holding the exact tokens up to and
including its own, and fails where a row would attend to anything but its own history. The "model" chooses a token from
what it finds in memory, so a wrong block shows as a wrong output too.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from wsbatch.batching import rows
from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Idle, Step
from wsbatch.messages import SamplingParams
from wsbatch.steps import PagedStep, StepResult

VOCAB = 2  # few tokens: different requests often share beginnings


def next_token(history: tuple[int, ...]) -> int:
    """The "model": a token from everything before it."""
    return (sum(history) + len(history) // 3) % VOCAB


def continuation(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = prompt
    for _ in range(count):
        tokens += (next_token(tokens),)
    return tokens[len(prompt) :]


@dataclass
class Seen:
    """One request as the oracle sees it."""

    request: ScheduledRequest
    emitted: list[int] = field(default_factory=list)
    position: int | None = None  # next to be computed; None before it first runs
    prompt_end: int = 0
    runs: bool = False
    preempted: int = 0
    restarts: int = 0
    computed: int = 0  # tokens computed for it in all
    released: int = 0


class Oracle:
    def __init__(self, scheduler: ContinuousScheduler, limits: dict[str, int], max_preemptions: int) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self.max_preemptions = max_preemptions
        self.kv: dict[tuple[int, int], tuple[int, ...] | None] = {}
        self.live: dict[int, Seen] = {}
        self.all: dict[int, Seen] = {}
        self.flight: PagedStep | None = None
        self.steps = 0
        self.now_s = 0.0

    def add(self, prompt: tuple[int, ...], max_new: int, priority: int) -> None:
        key = len(self.all)
        request = ScheduledRequest(
            key=key,
            token_ids=prompt,
            max_new_tokens=max_new,
            sampling=SamplingParams(seed=key),
            priority=priority,
            arrived_s=self.now_s,
        )
        self.live[key] = self.all[key] = Seen(request)
        self.scheduler.add(request)
        self.now_s += 3.0

    def decide(self) -> bool:
        """One decision, checked in every respect; False where it is idle."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        waiting = {request.key for request in scheduler.queue}
        preemptions = scheduler.preemptions
        decoding = {
            key
            for key, seen in self.live.items()
            if seen.runs and seen.position is not None and seen.position >= seen.prompt_end
        }
        decision = scheduler.decide(self.now_s)
        scheduler.check()
        assert pool.free + pool.cached + pool.used == pool.total
        if isinstance(decision, Idle):
            assert not self.live
            assert pool.free + pool.cached == pool.total
            return False
        assert isinstance(decision, Step)
        assert isinstance(decision.plan, PagedStep)
        self.steps += 1
        preempted = {row.request.key for row in scheduler._rows.preempted}
        victims = {key for key in preempted if self.live[key].runs}
        assert scheduler.preemptions == preemptions + len(victims)
        for key in preempted:
            self.live[key].runs = False
        self.check_victims(victims)
        ran = {key for key, seen in self.live.items() if seen.runs}
        self.check_entries(decision, waiting, bool(victims))
        self.check_budgets(decision.plan, decoding, preempted)
        for phase in (decoding, ran - decoding):
            orders = [self.live[row.key].request.order for row in decision.plan.rows if row.key in phase]
            assert orders == sorted(orders)
        self.write(decision.plan)
        self.flight = decision.plan
        return True

    def check_entries(self, step: Step, waiting: set[int], preempting: bool) -> None:
        plan = step.plan
        assert isinstance(plan, PagedStep)
        keys = [row.key for row in plan.rows]
        assert len(set(keys)) == len(keys)
        assert waiting - set(step.started) == {request.key for request in self.scheduler.queue}
        entered = [key for key in keys if not self.live[key].runs]
        assert [key for key in entered if self.live[key].position is None] == list(step.started)
        assert not (preempting and entered)
        orders = [self.live[key].request.order for key in entered]
        assert orders == sorted(orders)
        held_back = [seen.request.order for key, seen in self.live.items() if not seen.runs and key not in entered]
        assert not orders or not held_back or max(orders) < min(held_back)
        for row in plan.rows:
            seen = self.live[row.key]
            if row.key in entered:
                assert row.start % self.scheduler.pool.block_tokens == 0
                if seen.position is not None:
                    seen.restarts += 1
                else:
                    report = self.scheduler.report(row.key)
                    assert report is not None
                    assert report.cached_tokens == row.start
                seen.runs = True
                seen.position = row.start
                seen.prompt_end = len(seen.request.token_ids) + len(seen.emitted)

    def check_victims(self, victims: set[int]) -> None:
        """Only the least urgent of those that may be preempted are; what is planned keeps the order in each phase."""
        remaining = [
            seen.request.order for seen in self.live.values() if seen.runs and seen.preempted < self.max_preemptions
        ]
        for key in victims:
            seen = self.live[key]
            seen.preempted += 1
            assert seen.preempted <= self.max_preemptions
            assert not remaining or max(remaining) < seen.request.order

    def check_budgets(self, plan: PagedStep, decoding: set[int], preempted: set[int]) -> None:
        assert 1 <= len(plan.rows) <= self.limits["max_batch_size"]
        assert sum(seen.runs for seen in self.live.values()) <= self.limits["max_batch_size"]
        prefill = 0
        order_of_phases = []
        for row in plan.rows:
            seen = self.live[row.key]
            assert row.start == seen.position, "each position is computed once, in order"
            decodes = row.start >= seen.prompt_end
            order_of_phases.append(not decodes)
            if decodes:
                assert len(row.token_ids) == 1
            else:
                prefill += len(row.token_ids)
        assert order_of_phases == sorted(order_of_phases), "decodes come first"
        most = "prefill_chunk_tokens" if decoding else "max_batch_prefill_tokens"
        assert prefill <= self.limits[most]
        left_out = decoding - preempted - {row.key for row in plan.rows}
        assert not left_out or not self.scheduler.pool.available, "a decode waits only for blocks"

    def write(self, plan: PagedStep) -> None:
        """Run the plan on the KV memory, as the model does: write the new tokens, then attend to everything."""
        size = self.scheduler.pool.block_tokens
        tables = {row.request.key: row.table for row in self.scheduler._rows.running}
        for row in plan.rows:
            seen = self.live[row.key]
            tokens = seen.request.token_ids + tuple(seen.emitted)
            end = row.start + len(row.token_ids)
            assert row.token_ids == tokens[row.start : end]
            assert len(tokens) < len(seen.request.token_ids) + seen.request.max_new_tokens
            assert (row.sampling is not None) == (end == len(tokens))
            assert row.sampling is None or row.sampling is seen.request.sampling
            assert tables[row.key] == row.block_table
            assert len(set(row.block_table)) == len(row.block_table)
            written = set(row.block_table[row.start // size : (end - 1) // size + 1])
            assert len(written) == (end - 1) // size + 1 - row.start // size
            for other, table in tables.items():
                assert other == row.key or not written & set(table), "nobody else holds a block that is written to"
            for position in range(row.start, end):
                self.kv[row.block_table[position // size], position % size] = tokens[: position + 1]
            seen.position = end
            seen.computed += len(row.token_ids)
        for row in plan.rows:
            seen = self.live[row.key]
            tokens = seen.request.token_ids + tuple(seen.emitted)
            for position in range(row.start + len(row.token_ids)):
                found = self.kv.get((row.block_table[position // size], position % size))
                assert found == tokens[: position + 1], f"row {row.key} attends to {found} at {position}"

    def complete(self) -> None:
        plan, self.flight = self.flight, None
        assert plan is not None
        size = self.scheduler.pool.block_tokens
        ids, expected = [], []
        for row in plan.rows:
            if row.sampling is not None:
                last = row.start + len(row.token_ids) - 1
                history = self.kv[row.block_table[last // size], last % size]
                assert history is not None
                ids.append(next_token(history))
                if row.key in self.live:
                    expected.append((row.key, ids[-1]))
        outcome = self.scheduler.complete(StepResult(tuple(ids), None, 1.0), self.now_s)
        assert [(token.key, token.token_id) for token in outcome.tokens] == expected
        assert outcome.cost.rows == len(plan.rows)
        assert outcome.cost.issued_tokens == sum(len(row.token_ids) for row in plan.rows)
        assert 0 <= outcome.cost.useful_tokens <= outcome.cost.issued_tokens
        prompts = [row for row in plan.rows if row.start < self.all[row.key].prompt_end]
        assert outcome.cost.prefill_tokens == sum(len(row.token_ids) for row in prompts)
        for key, token_id in expected:
            seen = self.live[key]
            seen.emitted.append(token_id)
            if len(seen.emitted) == seen.request.max_new_tokens:
                self.end(key)
        self.collect()

    def abort(self) -> None:
        """The step raised half way: what it should have written is garbage now."""
        plan, self.flight = self.flight, None
        assert plan is not None
        size = self.scheduler.pool.block_tokens
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.token_ids)):
                self.kv[row.block_table[position // size], position % size] = None
        alive = [row.key for row in plan.rows if row.key in self.live]
        assert list(self.scheduler.abort(self.now_s)) == alive
        for key in alive:
            del self.live[key]
        self.collect()

    def end(self, key: int) -> None:
        self.scheduler.end(key, self.now_s)
        self.live.pop(key)
        assert self.scheduler.request(key) is None

    def collect(self) -> None:
        for release in self.scheduler.releases():
            assert release.hol_delay_s == 0
            assert release.key not in self.live
            self.all[release.key].released += 1
            assert self.scheduler.report(release.key) is None
        self.scheduler.check()
        pool = self.scheduler.pool
        assert self.scheduler.running == sum(seen.position is not None for seen in self.live.values())
        if not self.live and self.flight is None:
            assert pool.free + pool.cached == pool.total


configs = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 5),
        "prefill_chunk_tokens": st.integers(1, 9),
        "extra_prefill_tokens": st.integers(0, 12),
        "max_preemptions": st.integers(1, 3),
        "total_blocks": st.integers(2, 14),
        "block_tokens": st.integers(1, 5),
        "prefix_cache": st.booleans(),
    }
)
adds = st.tuples(
    st.just("add"),
    st.integers(1, 30),  # prompt length
    st.integers(0, 3),  # where its own tokens begin: a multiple of this many
    st.integers(1, 20),  # max_new_tokens
    st.integers(0, 9),  # priority
)
events = st.one_of(
    adds,
    adds,
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("end"), st.integers(0, 50)),
    st.tuples(st.just("end in flight"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("abort")),
)


def make(config: dict[str, Any]) -> Oracle:
    limits = dict(config)
    limits["max_batch_prefill_tokens"] = limits["prefill_chunk_tokens"] + limits.pop("extra_prefill_tokens")
    pool = BlockPool(
        limits.pop("total_blocks"), limits.pop("block_tokens"), prefix_cache=bool(limits.pop("prefix_cache"))
    )
    max_preemptions = limits.pop("max_preemptions")
    return Oracle(ContinuousScheduler(pool=pool, **limits), limits, max_preemptions)


def prompt_of(length: int, own: int) -> tuple[int, ...]:
    """So many tokens, of which the first `own` are those of every other prompt; 0: all are."""
    shared = [0, 1, 1, 0, 0, 0, 1, 1, 0, 1] * 3
    return tuple(shared[:own] + [(index + own) % VOCAB for index in range(own, length)] if own else shared)[:length]


def apply(oracle: Oracle, event: tuple[Any, ...]) -> None:
    match event:
        case ("add", length, own, max_new, priority):
            most = oracle.scheduler.max_request_tokens
            length = min(length, most - 1)
            oracle.add(prompt_of(length, own), min(max_new, most - length), priority)
        case ("step", count):
            for _ in range(count):
                if oracle.decide():
                    oracle.complete()
        case ("end", number) if oracle.live:
            oracle.end(sorted(oracle.live)[number % len(oracle.live)])
            oracle.collect()
        case ("end in flight", number, fails) if oracle.live and oracle.decide():
            oracle.end(sorted(oracle.live)[number % len(oracle.live)])
            oracle.collect()
            if fails:
                oracle.abort()
            else:
                oracle.complete()
        case ("abort",) if oracle.decide():
            oracle.abort()


def play(oracle: Oracle, trace: list[tuple[Any, ...]]) -> None:
    """Apply the trace, then run until everyone is done. With fewer preemptions a row, short traces use them up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MAX_PREEMPTIONS", oracle.max_preemptions)
        for event in trace:
            apply(oracle, event)
        while oracle.decide():
            oracle.complete()
            work_at_most = sum(
                (1 + oracle.max_preemptions) * (len(seen.request.token_ids) + seen.request.max_new_tokens)
                for seen in oracle.all.values()
            )
            assert oracle.steps <= work_at_most, "every step computes something, and nothing is recomputed for ever"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, trace=st.lists(events, max_size=25))
def test_any_trace(config: dict[str, Any], trace: list[tuple[Any, ...]]) -> None:
    oracle = make(config)
    play(oracle, trace)
    assert not oracle.live
    assert oracle.scheduler.running == 0
    assert not oracle.scheduler.queue
    for seen in oracle.all.values():
        assert seen.released == (seen.position is not None), "released once if it ever ran"
        assert tuple(seen.emitted) == continuation(seen.request.token_ids, len(seen.emitted))
        length = len(seen.request.token_ids) + seen.request.max_new_tokens
        assert seen.computed <= (1 + seen.restarts) * (length - 1)
        assert seen.restarts <= oracle.max_preemptions


scarce_blocks = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(2, 5),
        "prefill_chunk_tokens": st.integers(2, 9),
        "extra_prefill_tokens": st.integers(0, 12),
        "max_preemptions": st.integers(1, 2),
        "total_blocks": st.integers(4, 12),
        "block_tokens": st.integers(1, 2),
        "prefix_cache": st.booleans(),
    }
)
short_prompts = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 4), st.integers(0, 3), st.integers(1, 12), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


@settings(max_examples=400, deadline=None)
@example(  # one that must not be preempted any more is the last in order when another needs a block: found by search
    config={
        "max_batch_size": 4,
        "prefill_chunk_tokens": 6,
        "extra_prefill_tokens": 10,
        "max_preemptions": 1,
        "total_blocks": 12,
        "block_tokens": 1,
        "prefix_cache": True,
    },
    trace=[
        ("add", 2, 0, 12, 8),
        ("add", 4, 2, 8, 5),
        ("step", 2),
        ("add", 3, 2, 5, 6),
        ("add", 4, 3, 10, 6),
    ],
)
@given(config=scarce_blocks, trace=st.lists(short_prompts, min_size=1, max_size=12))
def test_everyone_gets_all_tokens_though_blocks_are_scarce(
    config: dict[str, Any], trace: list[tuple[Any, ...]]
) -> None:
    oracle = make(config)
    play(oracle, trace)
    for seen in oracle.all.values():
        assert tuple(seen.emitted) == continuation(seen.request.token_ids, seen.request.max_new_tokens)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_traces_reach_what_they_are_meant_to_test(prefix_cache: bool) -> None:
    """Guards the generator: preemption, prefix hits and eviction all happen in traces of this kind."""
    config = {
        "max_batch_size": 4,
        "prefill_chunk_tokens": 4,
        "extra_prefill_tokens": 4,
        "max_preemptions": 2,
        "total_blocks": 14,
        "block_tokens": 2,
        "prefix_cache": prefix_cache,
    }
    oracle = make(config)
    play(oracle, [("add", 5 + index % 7, index % 4, 14, index % 3) for index in range(12)])
    assert oracle.scheduler.preemptions > 0
    assert max(seen.restarts for seen in oracle.all.values()) > 0
    assert (oracle.scheduler.pool.hit_tokens > 0) == prefix_cache
    assert (oracle.scheduler.pool.evictions > 0) == prefix_cache
