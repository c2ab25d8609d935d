"""What schedulers say about the rows of the step in flight."""

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.dynamic import DynamicScheduler, DynamicSettings
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Scheduler, Step
from wsbatch.messages import SamplingParams
from wsbatch.steps import PaddedDecode, PaddedStart, PagedStep, StepResult


def request(key: int, prompt: int, max_new: int) -> ScheduledRequest:
    return ScheduledRequest(
        key=key,
        token_ids=tuple(range(prompt)),
        max_new_tokens=max_new,
        sampling=SamplingParams(),
        priority=5,
        arrived_s=float(key),
    )


def launch(scheduler: Scheduler) -> Step:
    step = scheduler.decide(100.0)
    assert isinstance(step, Step)
    return step


def complete(scheduler: Scheduler, step: Step, rows: int) -> None:
    if isinstance(step.plan, PagedStep):
        rows = sum(row.sampling is not None for row in step.plan.rows)
    scheduler.complete(StepResult((1,) * rows, None, 1.0), 100.0)


def dynamic(**settings: bool) -> DynamicScheduler:
    scheduler = DynamicScheduler(DynamicSettings(max_batch_size=2, max_wait_s=0.0, **settings), now_s=0.0)
    scheduler.add(request(1, 3, 9))
    scheduler.add(request(2, 5, 9))
    return scheduler


def test_rows_of_a_padded_batch_that_are_over_are_kept() -> None:
    scheduler = dynamic()
    step = launch(scheduler)
    assert isinstance(step.plan, PaddedStart)
    assert list(scheduler.slot_phases()) == [(1, "prefill"), (2, "prefill")]
    complete(scheduler, step, 2)
    scheduler.end(1, 100.0)
    step = launch(scheduler)
    assert list(scheduler.slot_phases()) == [(1, "kept"), (2, "decode")]


def test_a_row_that_compaction_drops_holds_no_slot() -> None:
    scheduler = dynamic(early_compaction=True)
    complete(scheduler, launch(scheduler), 2)
    scheduler.end(1, 100.0)
    assert launch(scheduler).plan == PaddedDecode(keep=(1,))
    assert list(scheduler.slot_phases()) == [(2, "decode")]


def test_a_row_without_room_for_its_next_token_is_held() -> None:
    pool = BlockPool(5, 2, prefix_cache=False)
    scheduler = ContinuousScheduler(max_batch_size=8, max_batch_prefill_tokens=8, prefill_chunk_tokens=4, pool=pool)
    scheduler.add(request(1, 1, 5))
    scheduler.add(request(2, 4, 5))
    seen = []
    for _ in range(4):
        step = launch(scheduler)
        seen.append(list(scheduler.slot_phases()))
        complete(scheduler, step, 0)
    assert seen[0] == [(1, "prefill"), (2, "prefill")]
    assert seen[1] == [(1, "decode"), (2, "decode")]
    assert seen[3] == [(1, "decode"), (2, "held")]
