"""The dynamic scheduler's bookkeeping: rows, ends, releases, accounting, compaction."""

import pytest

from wsbatch.batching.dynamic import DynamicScheduler, DynamicSettings
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Step
from wsbatch.messages import SamplingParams
from wsbatch.model.simulated import SimulatedModel
from wsbatch.steps import PaddedDecode


def make(**changes: object) -> DynamicScheduler:
    values = {"max_batch_size": 8, "max_wait_s": 0.0} | changes
    return DynamicScheduler(DynamicSettings(**values), now_s=0.0)  # type: ignore[arg-type]


def request(key: int, length: int = 3, max_new_tokens: int = 4) -> ScheduledRequest:
    return ScheduledRequest(
        key=key,
        token_ids=tuple(range(40, 40 + length)),
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(),
        priority=5,
        arrived_s=0.0,
    )


def run_out(
    scheduler: DynamicScheduler, requests: list[ScheduledRequest]
) -> tuple[dict[int, list[int]], dict[int, float]]:
    """Run to the end on the simulated model, a second a step; tokens and head-of-line delay by key."""
    model = SimulatedModel()
    for item in requests:
        scheduler.add(item)
    budgets = {item.key: item.max_new_tokens for item in requests}
    tokens: dict[int, list[int]] = {key: [] for key in budgets}
    delays: dict[int, float] = {}
    now_s = 0.0
    while isinstance(step := scheduler.decide(now_s), Step):
        now_s += 1.0
        for token in scheduler.complete(model.compute(step.plan), now_s).tokens:
            tokens[token.key].append(token.token_id)
            if len(tokens[token.key]) == budgets[token.key]:
                scheduler.end(token.key, now_s)
        for release in scheduler.releases():
            assert release.key not in delays
            delays[release.key] = release.hol_delay_s
    return tokens, delays


def test_seven_short_rows_behind_a_long_one_waste_79_percent() -> None:
    """The design's example: 248 decode slots issued, 52 useful; the short rows wait 28 more steps."""
    scheduler = make()
    requests = [request(key, max_new_tokens=4) for key in range(7)] + [request(7, max_new_tokens=32)]
    tokens, delays = run_out(scheduler, requests)
    assert [len(tokens[key]) for key in range(8)] == [4] * 7 + [32]
    decode = scheduler.ledger.decode
    assert (decode.steps, decode.issued_tokens, decode.useful_tokens) == (31, 248, 52)
    assert decode.waste_fraction == pytest.approx(1 - 52 / 248)
    assert delays == {**dict.fromkeys(range(7), 28.0), 7: 0.0}


def test_prefill_padding_is_issued_but_not_useful() -> None:
    scheduler = make()
    run_out(scheduler, [request(1, length=2, max_new_tokens=1), request(2, length=10, max_new_tokens=1)])
    prefill = scheduler.ledger.prefill
    assert (prefill.issued_tokens, prefill.useful_tokens) == (20, 12)


def test_compaction_gives_the_same_tokens_with_less_waste() -> None:
    requests = [request(key, length=key + 1, max_new_tokens=2 + 5 * key) for key in range(6)]
    plain, compacting = make(), make(early_compaction=True)
    expected, _ = run_out(plain, list(requests))
    got, delays = run_out(compacting, list(requests))
    assert got == expected
    assert set(delays) == set(expected)
    assert compacting.ledger.decode.issued_tokens < plain.ledger.decode.issued_tokens
    assert compacting.ledger.decode.useful_tokens == plain.ledger.decode.useful_tokens


def test_compaction_waits_for_half_of_the_rows() -> None:
    scheduler = make(early_compaction=True)
    model = SimulatedModel()
    for key in range(4):
        scheduler.add(request(key))
    step = scheduler.decide(0.0)
    assert isinstance(step, Step)
    scheduler.complete(model.compute(step.plan), 1.0)
    scheduler.end(0, 1.0)
    step = scheduler.decide(1.0)
    assert isinstance(step, Step)
    assert step.plan == PaddedDecode(None)
    scheduler.complete(model.compute(step.plan), 2.0)
    scheduler.end(2, 2.0)
    step = scheduler.decide(2.0)
    assert isinstance(step, Step)
    assert step.plan == PaddedDecode((1, 3))


def test_a_row_cancelled_in_flight_gives_no_token_and_is_released_with_its_batch() -> None:
    scheduler = make()
    model = SimulatedModel()
    scheduler.add(request(1))
    scheduler.add(request(2))
    step = scheduler.decide(0.0)
    assert isinstance(step, Step)
    scheduler.end(1, 0.5)
    outcome = scheduler.complete(model.compute(step.plan), 1.0)
    assert [token.key for token in outcome.tokens] == [2]
    assert not scheduler.releases()
    scheduler.end(2, 1.0)
    assert [(item.key, item.hol_delay_s) for item in scheduler.releases()] == [(1, 0.5), (2, 0.0)]
    assert scheduler.running == 0


def test_the_whole_batch_cancelled_in_flight_frees_the_model() -> None:
    scheduler = make()
    model = SimulatedModel()
    scheduler.add(request(1))
    step = scheduler.decide(0.0)
    assert isinstance(step, Step)
    scheduler.end(1, 0.5)
    assert not scheduler.releases()  # the step still runs on the row
    assert scheduler.complete(model.compute(step.plan), 1.0).tokens == ()
    assert [item.key for item in scheduler.releases()] == [1]
    scheduler.add(request(2))
    assert isinstance(scheduler.decide(1.0), Step)


def test_abort_drops_the_batch() -> None:
    scheduler = make()
    scheduler.add(request(1))
    scheduler.add(request(2))
    assert isinstance(scheduler.decide(0.0), Step)
    assert scheduler.abort(1.0) == (1, 2)
    assert [item.key for item in scheduler.releases()] == [1, 2]
    assert scheduler.running == 0


def test_report_counts_only_the_steps_of_the_request() -> None:
    scheduler = make(max_batch_size=2)
    run_out(scheduler, [request(1, max_new_tokens=3), request(2, max_new_tokens=3)])
    scheduler.add(request(3, length=5, max_new_tokens=2))
    step = scheduler.decide(10.0)
    assert isinstance(step, Step)
    model = SimulatedModel()
    scheduler.complete(model.compute(step.plan), 11.0)
    report = scheduler.report(3)
    assert report is not None
    assert (report.max_size, report.mean_size, report.issued_tokens, report.useful_tokens) == (1, 1.0, 5, 5)


def test_a_probe_runs_only_between_batches() -> None:
    scheduler = make()
    probe = scheduler.probe((40, 41))
    assert probe is not None
    assert [(row.token_ids, row.sampling) for row in probe.rows] == [((40, 41), SamplingParams())]
    scheduler.add(request(1))
    step = scheduler.decide(0.0)
    assert isinstance(step, Step)
    assert scheduler.probe((40, 41)) is None
    scheduler.abort(1.0)
    assert scheduler.probe((40, 41)) == probe
