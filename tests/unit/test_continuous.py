"""The continuous scheduler's rules, one by one, on plans written out by hand."""

from typing import Any

import pytest

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.queue import AGEING_S, ScheduledRequest
from wsbatch.batching.scheduler import Idle, Release, Step, StepOutcome
from wsbatch.messages import SamplingParams
from wsbatch.steps import PagedRow, PagedStep, StepResult


def scheduler(
    blocks: int = 1000, block_tokens: int = 4, *, prefix_cache: bool = False, **changes: Any
) -> ContinuousScheduler:
    settings = {"max_batch_size": 8, "max_batch_prefill_tokens": 64, "prefill_chunk_tokens": 8, **changes}
    return ContinuousScheduler(pool=BlockPool(blocks, block_tokens, prefix_cache=prefix_cache), **settings)


def add(to: ContinuousScheduler, key: int, prompt: int | tuple[int, ...], max_new: int = 10, **changes: Any) -> None:
    tokens = prompt if isinstance(prompt, tuple) else tuple(range(100 * key, 100 * key + prompt))
    fields: dict[str, Any] = {"priority": 5, "arrived_s": float(key), "sampling": SamplingParams(seed=key), **changes}
    to.add(ScheduledRequest(key=key, token_ids=tokens, max_new_tokens=max_new, **fields))


def decide(of: ContinuousScheduler) -> tuple[PagedRow, ...]:
    decision = of.decide(0.0)
    assert isinstance(decision, Step)
    assert isinstance(decision.plan, PagedStep)
    return decision.plan.rows


def complete(of: ContinuousScheduler, rows: tuple[PagedRow, ...], token: int = 7) -> StepOutcome:
    of.check()
    outcome = of.complete(StepResult(tuple(token for row in rows if row.sampling), None, 1.0), 0.0)
    of.check()
    return outcome


def step(of: ContinuousScheduler) -> list[tuple[int, int, int]]:
    """One step, run; its rows as (key, start, new tokens)."""
    rows = decide(of)
    complete(of, rows)
    return [(row.key, row.start, len(row.token_ids)) for row in rows]


def test_decodes_then_running_prefills_then_new_requests_share_the_budget() -> None:
    batch = scheduler()
    add(batch, 1, 3)
    add(batch, 2, 64)
    assert step(batch) == [(1, 0, 3), (2, 0, 61)]  # nobody decodes: max_batch_prefill_tokens
    add(batch, 3, 2)
    add(batch, 4, 30)
    add(batch, 5, 30)
    assert step(batch) == [(1, 3, 1), (2, 61, 3), (3, 0, 2), (4, 0, 3)]  # prefill_chunk_tokens, decodes not counted
    assert step(batch) == [(1, 4, 1), (2, 64, 1), (3, 2, 1), (4, 3, 8)]
    batch.end(4, 0.0)
    assert step(batch)[3:] == [(5, 0, 8)]


def test_only_the_end_of_a_prompt_samples() -> None:
    batch = scheduler(max_batch_prefill_tokens=8)
    add(batch, 1, 10)
    rows = decide(batch)
    assert rows[0].sampling is None
    assert complete(batch, rows).tokens == ()
    rows = decide(batch)
    assert rows[0].sampling == SamplingParams(seed=1)
    assert rows[0].token_ids == (108, 109)
    assert [(token.key, token.token_id) for token in complete(batch, rows, 55).tokens] == [(1, 55)]
    (row,) = decide(batch)
    assert (row.token_ids, row.start, row.sampling) == ((55,), 10, SamplingParams(seed=1))
    assert len(row.block_table) == 3


def test_a_batch_has_at_most_max_batch_size_rows_and_a_free_slot_is_taken_at_once() -> None:
    batch = scheduler(max_batch_size=2)
    for key in (1, 2, 3):
        add(batch, key, 2)
    assert [row[0] for row in step(batch)] == [1, 2]
    assert batch.running == 2
    batch.end(1, 0.0)
    assert step(batch) == [(2, 2, 1), (3, 0, 2)]


def test_nothing_to_do_is_idle_and_nobody_is_ever_kept_waiting_for_company() -> None:
    batch = scheduler()
    assert batch.decide(0.0) == Idle()
    add(batch, 1, 2, arrived_s=0.0)
    assert isinstance(batch.decide(0.0), Step)


def test_the_urgent_go_first_and_equals_in_order_of_arrival() -> None:
    batch = scheduler(max_batch_size=1)
    add(batch, 1, 1, arrived_s=0.0)
    add(batch, 2, 1, arrived_s=1.0)
    add(batch, 3, 1, arrived_s=2.0, priority=0)
    order = []
    for _ in range(3):
        ((key, _, _),) = step(batch)
        order.append(key)
        batch.end(key, 0.0)
    assert order == [3, 1, 2]


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    batch = scheduler(max_batch_size=1)
    add(batch, 0, 1, arrived_s=0.0, priority=9)
    for key in range(1, 1000):
        add(batch, key, 1, arrived_s=float(key), priority=0)
        ((ran, _, _),) = step(batch)
        batch.end(ran, 0.0)
        if ran == 0:
            break
    assert key <= 9 * AGEING_S + 1


def test_a_request_that_has_no_room_yet_is_not_passed() -> None:
    batch = scheduler(blocks=10)
    add(batch, 1, 16, max_new=4)
    assert step(batch) == [(1, 0, 16)]
    add(batch, 2, 30)
    add(batch, 3, 1)
    assert step(batch) == [(1, 16, 1)]
    batch.end(1, 0.0)
    assert [row[0] for row in step(batch)] == [2]  # 8 blocks; for 3, one is missing of its own, one each for the two


def test_newcomers_leave_a_block_for_each_running_row_unless_nothing_runs() -> None:
    batch = scheduler(blocks=4)
    add(batch, 1, 15, max_new=1)
    assert step(batch) == [(1, 0, 15)]  # alone: the whole pool
    batch.end(1, 0.0)
    add(batch, 2, 8, max_new=8)
    assert step(batch) == [(2, 0, 8)]
    add(batch, 3, 1)
    assert step(batch) == [(2, 8, 1)]  # one block is free, and will be needed


def test_a_newcomer_waits_until_the_running_prompts_have_taken_their_blocks() -> None:
    batch = scheduler(blocks=12, max_batch_prefill_tokens=8)
    add(batch, 1, 28, max_new=9)
    add(batch, 2, 12)
    assert [step(batch), step(batch), step(batch)] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 8)]]
    assert step(batch) == [(1, 24, 4), (2, 0, 4)]  # 5 blocks are left: 3 of its own, one for each of the two


def test_a_newcomer_needs_blocks_for_its_whole_prompt() -> None:
    batch = scheduler(blocks=11, max_batch_prefill_tokens=8)
    add(batch, 1, 28, max_new=2)
    add(batch, 2, 12)
    assert [step(batch), step(batch), step(batch)] == [[(1, 0, 8)], [(1, 8, 8)], [(1, 16, 8)]]
    assert step(batch) == [(1, 24, 4)]  # 4 are left
    batch.end(1, 0.0)
    assert step(batch) == [(2, 0, 8)]


def preempting(**changes: Any) -> ContinuousScheduler:
    """Rows 1, 2 and 3 fill the pool of 7 blocks until 2 needs its third and 3 has just been preempted for it."""
    batch = scheduler(blocks=7, **changes)
    for key in (1, 2, 3):
        add(batch, key, 2, max_new=20)
        step(batch)
    while batch.preemptions == 0:
        keys = [row[0] for row in step(batch)]
    assert keys == [1, 2]
    return batch


def test_the_least_urgent_row_gives_way_and_comes_back_to_recompute_without_repeating_itself() -> None:
    batch = preempting()
    assert batch.running == 3
    assert len(batch.queue) == 0  # it is not waiting: it has had its first token
    batch.end(1, 0.0)
    rows = decide(batch)
    assert [(row.key, row.start) for row in rows] == [(2, 9), (3, 0)]
    assert rows[1].token_ids == (300, 301, 7, 7, 7, 7, 7, 7)
    assert rows[1].sampling == SamplingParams(seed=3)
    outcome = complete(batch, rows, 555)
    assert [(one.key, one.token_id) for one in outcome.tokens] == [(2, 555), (3, 555)]
    assert (outcome.cost.issued_tokens, outcome.cost.prefill_tokens) == (1 + 8, 8)
    assert outcome.cost.useful_tokens == 1 + 1  # 7 of the 8 were computed before
    (_, back) = decide(batch)
    assert (back.token_ids, back.start) == ((555,), 8)


def test_recomputation_is_prefill_and_keeps_to_its_budget() -> None:
    batch = preempting(prefill_chunk_tokens=3)
    batch.end(1, 0.0)
    assert step(batch) == [(2, 9, 1), (3, 0, 3)]
    rows = decide(batch)
    assert rows[1].sampling is None
    assert complete(batch, rows).cost.useful_tokens == 1
    assert step(batch) == [(2, 11, 1), (3, 6, 2)]


def test_the_preempted_come_back_before_newcomers_of_their_priority() -> None:
    batch = preempting()
    add(batch, 4, 1)
    add(batch, 5, 1, priority=0, arrived_s=4.0)
    batch.end(1, 0.0)
    batch.end(2, 0.0)
    assert [row[0] for row in step(batch)] == [5, 3, 4]


def test_a_step_that_preempts_lets_nobody_in() -> None:
    batch = scheduler(blocks=12)
    add(batch, 1, 4, max_new=20)
    add(batch, 2, 36)
    assert [row[0] for row in step(batch)] == [1, 2]
    assert [row[0] for row in step(batch)] == [1, 2]  # all blocks are taken
    add(batch, 3, 1, priority=0)
    while batch.preemptions == 0:
        rows = step(batch)
    assert rows == [(1, 8, 1)]
    assert batch.pool.free == 9
    assert step(batch) == [(1, 9, 1), (3, 0, 1)]


def test_a_prompt_takes_the_blocks_there_are_before_it_takes_those_of_others() -> None:
    batch = scheduler(blocks=26, block_tokens=1, prefill_chunk_tokens=4)
    add(batch, 1, 2, max_new=20)
    step(batch)
    add(batch, 2, 20, max_new=1, priority=0)
    for start in (0, 4, 8, 12):
        assert step(batch)[1] == (2, start, 4)
    assert step(batch) == [(1, 6, 1), (2, 16, 3)]
    assert batch.preemptions == 0
    assert step(batch) == [(2, 19, 1)]
    assert batch.preemptions == 1


def waiting_for_a_block() -> ContinuousScheduler:
    """Row 2 needs a block, all 5 are taken, and nobody is behind it."""
    batch = scheduler(blocks=5)
    add(batch, 1, 1, max_new=12)
    add(batch, 2, 8, max_new=8)
    for _ in range(5):
        assert [row[0] for row in step(batch)] == [1, 2]
    assert step(batch) == [(1, 5, 1)]
    assert batch.preemptions == 0
    return batch


def test_a_row_with_nobody_behind_it_keeps_what_it_has_and_waits() -> None:
    batch = waiting_for_a_block()
    batch.end(1, 0.0)
    assert step(batch) == [(2, 12, 1)]


def test_a_row_that_waits_is_preempted_once_a_row_before_it_needs_a_block() -> None:
    batch = waiting_for_a_block()
    assert [step(batch), step(batch), batch.preemptions] == [[(1, 6, 1)], [(1, 7, 1)], 0]
    assert [step(batch), batch.preemptions] == [[(1, 8, 1)], 1]


def test_preempted_often_enough_a_row_has_its_whole_length_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsbatch.batching.rows.MAX_PREEMPTIONS", 1)
    batch = preempting()
    batch.end(1, 0.0)
    assert step(batch) == [(2, 9, 1), (3, 0, 8)]
    while batch.preemptions == 1:
        keys = [row[0] for row in step(batch)]
    assert keys == [3]  # 2 is more urgent, and has to give way
    for _ in range(8):  # and stays out until 3 is done: its own length, reserved too, does not fit beside that of 3
        assert [row[0] for row in step(batch)] == [3]
    batch.end(3, 0.0)
    assert step(batch)[0][:2] == (2, 0)
    assert batch.preemptions == 2


def test_nothing_is_planned_beyond_max_new_tokens() -> None:
    batch = scheduler()
    add(batch, 1, 3, max_new=2)
    assert [step(batch), step(batch)] == [[(1, 0, 3)], [(1, 3, 1)]]
    assert batch.decide(0.0) == Idle()  # until the engine ends it
    batch.end(1, 0.0)
    assert batch.pool.free == batch.pool.total


def test_blocks_of_a_row_cancelled_in_flight_are_freed_after_the_step() -> None:
    batch = scheduler(blocks=2, prefix_cache=True)
    add(batch, 1, 7, max_new=1)
    rows = decide(batch)
    batch.end(1, 0.0)
    assert batch.running == 0
    assert batch.request(1) is None
    assert list(batch.releases()) == [Release(1, 0.0)]
    assert batch.pool.used == 2
    outcome = complete(batch, rows)
    assert outcome.tokens == ()
    assert (outcome.cost.issued_tokens, outcome.cost.useful_tokens) == (7, 0)
    assert batch.pool.free == 2  # not cached: it may have been ended because its values were no numbers
    assert list(batch.releases()) == []


def test_a_row_that_left_in_flight_leaves_its_slot_and_the_others_their_tokens() -> None:
    batch = scheduler(max_batch_size=3)
    for key in (1, 2, 3, 4):
        add(batch, key, 2)
    rows = decide(batch)
    batch.end(2, 0.0)
    outcome = batch.complete(StepResult((11, 22, 33), ((-1.0, ()), None, (-3.0, ())), 5.0), 0.0)
    assert [(one.key, one.token_id, one.logprobs) for one in outcome.tokens] == [
        (1, 11, (-1.0, ())),
        (3, 33, (-3.0, ())),
    ]
    assert outcome.cost.seconds == 0.005
    assert len(rows) == 3
    assert [row[0] for row in step(batch)] == [1, 3, 4]


def test_an_aborted_step_drops_its_rows_and_publishes_nothing() -> None:
    batch = scheduler(prefix_cache=True, max_batch_prefill_tokens=8)
    add(batch, 1, 16)
    add(batch, 2, 4)
    step(batch)  # 1 computes 8 and fills the budget
    decide(batch)
    batch.end(1, 0.0)
    assert batch.abort(0.0) == ()
    assert list(batch.releases()) == [Release(1, 0.0)]
    assert batch.pool.cached == 2  # of the completed step; what the aborted one wrote is not among it
    assert [row[0] for row in step(batch)] == [2]
    decide(batch)
    assert batch.abort(0.0) == (2,)
    assert batch.running == 0
    assert batch.pool.used == 0
    assert batch.pool.cached == 3
    batch.check()
    assert batch.decide(0.0) == Idle()


def test_rows_that_were_not_in_the_aborted_step_go_on() -> None:
    batch = scheduler(prefill_chunk_tokens=4)
    add(batch, 1, 2)
    step(batch)
    add(batch, 2, 4)
    add(batch, 3, 4)
    assert [row.key for row in decide(batch)] == [1, 2]
    assert batch.abort(0.0) == (1, 2)
    assert step(batch) == [(3, 0, 4)]


def test_a_known_prefix_is_not_computed_again() -> None:
    batch = scheduler(prefix_cache=True)
    prompt = tuple(range(12))
    add(batch, 1, prompt, max_new=2)
    assert step(batch) == [(1, 0, 12)]
    first = decide(batch)
    complete(batch, first)
    add(batch, 2, (*prompt, 99))
    add(batch, 3, prompt)
    assert batch.decide(0.0).started == (2, 3)  # type: ignore[union-attr]
    two, three = (row.table for row in batch._rows.running if row.request.key != 1)
    assert two[:3] == first[0].block_table[:3]
    assert three[:2] == two[:2]
    assert three[2] != two[2]  # its last token has to be computed, in a block of its own
    assert batch.report(2).cached_tokens == 12  # type: ignore[union-attr]
    assert batch.report(3).cached_tokens == 8  # type: ignore[union-attr]
    assert (batch.pool.queried_tokens, batch.pool.hit_tokens) == (12 + 13 + 12, 20)
    outcome = batch.complete(StepResult((5, 5), None, 1.0), 0.0)
    assert outcome.cost.issued_tokens == outcome.cost.useful_tokens == 1 + 4
    batch.check()
    # what 3 computed was known after all: one copy is kept
    assert next(row.table for row in batch._rows.running if row.request.key == 3) == two[:3]


def test_a_prefix_is_not_shared_before_its_step_is_done() -> None:
    batch = scheduler(prefix_cache=True)
    for key in (1, 2):
        add(batch, key, tuple(range(9)))
    assert step(batch) == [(1, 0, 9), (2, 0, 9)]
    add(batch, 3, tuple(range(9)))
    assert step(batch)[2] == (3, 8, 1)


def test_recomputed_prefixes_are_no_cache_hits() -> None:
    batch = preempting(prefix_cache=True)
    queried = batch.pool.queried_tokens
    batch.end(1, 0.0)
    assert step(batch)[-1][:2] == (3, 4)  # its first block was still there
    assert (batch.pool.queried_tokens, batch.pool.hit_tokens) == (queried, 0)
    assert batch.report(3).cached_tokens == 0  # type: ignore[union-attr]


def test_only_those_that_ran_are_released_and_each_once() -> None:
    batch = preempting()
    add(batch, 4, 2)
    for key in (4, 3, 1, 1, 99):  # waiting, preempted, running, gone, unknown
        batch.end(key, 0.0)
    assert list(batch.releases()) == [Release(3, 0.0), Release(1, 0.0)]
    assert list(batch.releases()) == []
    assert step(batch)[0][0] == 2


def test_a_report_goes_out_with_the_release() -> None:
    batch = scheduler()
    add(batch, 1, 3, max_new=2)
    add(batch, 2, 5)
    assert batch.report(1) is None
    request = batch.queue.get(1)
    step(batch)
    assert batch.request(1) is request
    add(batch, 3, 4)
    step(batch)
    batch.end(1, 0.0)
    assert batch.report(1) is None
    (release,) = batch.releases()
    report = release.report
    assert report is not None
    assert (report.max_size, report.mean_size) == (3, 2.5)
    assert (report.issued_tokens, report.useful_tokens, report.cached_tokens) == (8 + 6, 14, 0)


def test_seven_short_rows_beside_a_long_one_waste_nothing() -> None:
    """The workload of which a padded batch wastes 79 %: here a row that is done leaves."""
    batch = scheduler()
    for key in range(8):
        add(batch, key, 4, max_new=32 if key == 0 else 4)
    sizes = []
    while batch.running or batch.queue:
        rows = decide(batch)
        complete(batch, rows)
        sizes.append(len(rows))
        for row in rows:
            live = batch._live[row.key]
            if len(live.tokens) == live.limit:
                batch.end(row.key, 0.0)
    assert sizes == [8] * 4 + [1] * 28
    decode = batch.ledger.decode
    assert decode.issued_tokens == decode.useful_tokens == 52
    assert batch.ledger.prefill.waste_fraction == 0


def test_what_can_never_fit_is_refused() -> None:
    batch = scheduler(blocks=4)
    assert batch.max_request_tokens == 16
    with pytest.raises(ValueError, match="request 1 has 17 tokens: must be at most 16"):
        add(batch, 1, 10, max_new=7)
    with pytest.raises(ValueError, match="request 1 has 0 prompt tokens: must be at least 1"):
        add(batch, 1, ())
    add(batch, 1, 10, max_new=6)
    for _ in range(6):
        step(batch)
    assert batch.preemptions == 0


def test_one_decision_at_a_time_and_one_id_a_sample() -> None:
    batch = scheduler()
    add(batch, 1, 2)
    decide(batch)
    with pytest.raises(RuntimeError, match=r"1 rows in flight.*decide was called while a step is in flight"):
        batch.decide(0.0)
    with pytest.raises(ValueError, match="shorter"):
        batch.complete(StepResult((), None, 1.0), 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0: must be at least 1"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens is 0: must be at least 1"),
        ({"max_batch_prefill_tokens": 7}, "max_batch_prefill_tokens is 7: must be at least 8"),
    ],
)
def test_bounds_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(**changes)


def test_a_leak_does_not_pass_as_idle() -> None:
    batch = scheduler()
    batch.pool.allocate(1)
    with pytest.raises(RuntimeError, match="nobody is live and blocks are in use"):
        batch.decide(0.0)


def test_repr_shows_the_state() -> None:
    batch = preempting()
    add(batch, 4, 1)
    assert repr(batch).startswith("<ContinuousScheduler 1 waiting, 2 running, 1 preempted, 0 rows in flight, <Bl")


def test_a_probe_takes_no_block_from_anybody() -> None:
    batch = scheduler(4, prefix_cache=True)
    add(batch, 1, 8, max_new=1)
    (row,) = decide(batch)
    complete(batch, (row,))
    probe = batch.probe(tuple(range(9)))
    assert probe is not None
    (probing,) = probe.rows
    assert (probing.key, probing.token_ids, probing.start, len(probing.block_table)) == (0, (0, 1, 2, 3), 0, 1)
    assert not set(probing.block_table) & set(row.block_table)
    batch.check()
    assert (batch.pool.used, batch.pool.free) == (2, 2)
    batch.pool.allocate(2)
    assert batch.probe((1,)) is None
