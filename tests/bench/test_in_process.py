"""Figures that need no server: static batches, scaling, the fitted line; on a simulated model with its own clock."""

import random
from math import isclose
from pathlib import Path

import pytest

from stall import StallPoint, measure_stall
from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.engine.open import make_scheduler
from wsbatch.messages import SamplingParams
from wsbatch.model.simulated import SimulatedModel
from wsbatch.steps import PagedStep, StepPlan, StepResult
from wsbatch_bench.load.specs import parse_lengths
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.sampling import GREEDY
from wsbatch_bench.steps.bare_loop import LoopRequest, SteppedModel, run_loop
from wsbatch_bench.steps.engine_run import run_engine
from wsbatch_bench.steps.scaling import Scaling, StepSample, batch_requests, draw_scaling, fit_steps, measure_scaling
from wsbatch_bench.steps.static_batch import draw_timeline, draw_waste, measure_batches, pooled_waste
from wsbatch_bench.sweep.setting import Setting

COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)
PROMPTS = draw_trace(1).prompt_ids


def requests(*outputs: int, prompt: int = 16) -> list[LoopRequest]:
    return [LoopRequest(PROMPTS(index, prompt), tokens) for index, tokens in enumerate(outputs)]


def stepped(costs: CostModel = COSTS) -> SteppedModel:
    return SteppedModel(SimulatedModel(costs))


def test_seven_short_rows_behind_a_long_one() -> None:
    """The design's figures: 248 slots issued, 52 useful; held for (p + 31 d) / (p + 3 d) of their own time."""
    model = stepped()
    (batch,) = measure_batches(model, requests(*[4] * 7, 32), Setting("dynamic", 8), clock=model.clock)
    assert (batch.issued_slots, batch.useful_slots) == (248, 52)
    assert batch.waste_fraction == pytest.approx(0.79, abs=0.005)
    prefill_s, step_s = 0.010 + 0.0005 * 8 * 16, 0.018
    assert batch.prefill_s == pytest.approx(prefill_s)
    assert batch.seconds == pytest.approx(prefill_s + 31 * step_s)
    expected = (prefill_s + 31 * step_s) / (prefill_s + 3 * step_s)
    assert [row.hol_inflation for row in batch.rows] == pytest.approx([expected] * 7 + [1.0])
    assert batch.max_hol_inflation == pytest.approx(expected)
    assert batch.delay_s(0.5) == pytest.approx(28 * step_s)
    assert batch.delay_s(1.0) > 0
    assert batch.rows[-1].hol_delay_s == 0


def test_the_same_rows_in_continuous_batching() -> None:
    model = stepped()
    (batch,) = measure_batches(model, requests(*[4] * 7, 32), Setting("continuous", 8), clock=model.clock)
    assert batch.waste_fraction <= 0.01
    assert batch.max_hol_inflation <= 1.05


def test_the_whole_prefill_is_counted_where_it_takes_several_steps() -> None:
    """Eight prompts of 16 tokens, 16 of them a step: the first step alone is an eighth of it."""
    model = stepped()
    options = (("max_batch_prefill_tokens", 16), ("prefill_chunk_tokens", 16))
    setting = Setting("continuous", 8, options=options)
    (batch,) = measure_batches(model, requests(*[1] * 8), setting, clock=model.clock)
    assert batch.prefill_s == pytest.approx(8 * (0.010 + 0.0005 * 16))
    assert batch.prefill_s == pytest.approx(batch.seconds)


def test_compaction_drops_slots() -> None:
    model = stepped()
    setting = Setting("dynamic", 8, options=(("early_compaction", True),))
    (batch,) = measure_batches(model, requests(*[4] * 7, 32), setting, clock=model.clock)
    assert batch.issued_slots < 60


def test_measured_waste_matches_theory() -> None:
    outputs = parse_lengths("lognormal:median=20,sigma=0.9,max=200")
    rng = random.Random(3)
    drawn = requests(*(outputs.draw(rng) for _ in range(1200)), prompt=4)
    for size in (2, 8):
        model = stepped()
        batches = measure_batches(model, drawn, Setting("dynamic", size), clock=model.clock)
        assert len(batches) == 1200 // size
        assert pooled_waste(batches) == pytest.approx(outputs.padded_waste(size), abs=0.03)
        assert min(batch.waste_fraction for batch in batches) < pooled_waste(batches)  # they differ: no one number


def scaling(scheduler: str, costs: CostModel = COSTS) -> Scaling:
    return scalings(scheduler, stepped(costs), [GREEDY])[0]


def scalings(scheduler: str, model: SteppedModel, samplings: list[SamplingParams]) -> list[Scaling]:
    return measure_scaling(
        model,
        lambda size: make_scheduler(Setting(scheduler, size).config(), now_s=0.0),
        sizes=(1, 2, 4, 8, 16),
        prompt_tokens=16,
        output_tokens=8,
        rounds=2,
        clock=model.clock,
        make_prompt=PROMPTS,
        samplings=samplings,
    )


class DearSampling(SteppedModel):
    """A row whose token is drawn costs 2 ms more; the seeds are kept."""

    def __init__(self) -> None:
        super().__init__(SimulatedModel(COSTS))
        self.seeds: set[int | None] = set()

    def run(self, plan: StepPlan) -> StepResult:
        assert isinstance(plan, PagedStep)
        drawn = [row.sampling for row in plan.rows if row.sampling is not None and row.sampling.temperature]
        self.seeds |= {sampling.seed for sampling in drawn}
        self._now_s += 0.002 * len(drawn)
        return super().run(plan)


def test_sampled_steps_are_measured_beside_greedy_ones() -> None:
    model = DearSampling()
    greedy, sampled = scalings("continuous", model, [GREEDY, SamplingParams(temperature=0.7, top_p=0.9)])
    assert greedy.fit.costs.alpha_s == pytest.approx(0.001)
    assert sampled.fit.costs.alpha_s == pytest.approx(
        0.003, rel=0.02
    )  # the first tokens, in prefill steps, are drawn, too
    assert [point.step_s for point in sampled.points] == pytest.approx([0.013, 0.016, 0.022, 0.034, 0.058])
    assert model.seeds == set(range(16))  # each row's own, and the same every time


@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
def test_scaling_finds_the_costs_that_were_put_in(scheduler: str) -> None:
    curve = scaling(scheduler)
    assert curve.fit.costs.tau_s == pytest.approx(0.010)
    assert curve.fit.costs.alpha_s == pytest.approx(0.001)
    assert curve.fit.costs.beta_s == pytest.approx(0.0005)
    assert curve.fit.rms_error == pytest.approx(0, abs=1e-9)
    assert [point.step_s for point in curve.points] == pytest.approx([0.011, 0.012, 0.014, 0.018, 0.026])
    point = curve.points[3]
    assert point.goodput == pytest.approx(8 / 0.018)
    assert point.speedup == pytest.approx(8 * 0.011 / 0.018)
    assert point.efficiency == pytest.approx(0.011 / 0.018)
    assert curve.knee(0.5) == 8
    assert curve.knee(0.4) == 16
    assert curve.knee(1.1) is None


@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
def test_the_servers_own_loop_gives_the_same_tokens(scheduler: str) -> None:
    curve = scaling(scheduler)
    config = Setting(scheduler, 16, 60_000.0 if scheduler == "dynamic" else 0.0).config(model="simulated")
    (served,) = run_engine(config, [batch_requests(16, 16, 8, PROMPTS)], costs=COSTS)
    assert served.outputs == curve.outputs[16]
    assert served.output_tokens == 128
    assert 0 < served.model_s <= served.total_s


def noisy(count: int, seed: int) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        for rows, tokens in ((1, 0), (4, 0), (16, 0), (0, 100), (0, 400)):
            seconds = 0.010 + 0.001 * rows + 0.0005 * tokens
            samples.append(StepSample(rows, tokens, seconds * rng.lognormvariate(0, 0.05)))
    return samples


def test_the_intervals_of_the_fit_cover_the_truth() -> None:
    hits = 0
    for seed in range(40):
        fit = fit_steps(noisy(12, seed))
        hits += fit.tau_s.low <= 0.010 <= fit.tau_s.high
        hits += fit.alpha_s.low <= 0.001 <= fit.alpha_s.high
        hits += fit.beta_s.low <= 0.0005 <= fit.beta_s.high
    assert hits >= 0.85 * 120  # a bootstrap of twelve draws each is a little narrow
    assert fit_steps(noisy(12, 1)).rms_error == pytest.approx(0.05, rel=0.3)


def test_a_line_needs_two_kinds_of_steps() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fit_steps([StepSample(1, 0, 0.01)] * 5)


def test_the_loop_accounts_for_every_second() -> None:
    model = stepped()
    run = run_loop(
        model, make_scheduler(Setting("continuous", 4).config(), now_s=0.0), requests(5, 3, 8, 2, 6), clock=model.clock
    )
    assert run.output_tokens == 24
    assert isclose(run.total_s, run.model_s)
    assert [len(row.token_ids) for row in run.rows] == [5, 3, 8, 2, 6]
    assert run.rows[4].started_s >= min(row.ended_s for row in run.rows)  # the fifth waited for a slot
    assert run.steps[0].kv_tokens == 4 * 16


def test_the_charts_are_drawn(tmp_path: Path) -> None:
    model = stepped()
    batches = measure_batches(model, requests(4, 9, 2, 3), Setting("dynamic", 2), clock=model.clock)
    draw_timeline(batches[0], [tmp_path / "timeline.png"], title="two rows")
    draw_waste({2: batches}, {2: 0.3}, [tmp_path / "waste.svg"], title="waste")
    draw_scaling(scaling("dynamic"), [tmp_path / "scaling.png"], efficiency=0.5, title="scaling")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}


def stall(chunk_tokens: int) -> StallPoint:
    config = EngineConfig(
        model="simulated",
        scheduler="continuous",
        max_batch_size=9,
        prefill_chunk_tokens=chunk_tokens,
        max_batch_prefill_tokens=4096,
    )
    return measure_stall(config, streams=8, prompt_tokens=32, newcomer_tokens=4000, make_prompt=PROMPTS, costs=COSTS)


def test_chunks_bound_the_gap_that_a_long_prompt_makes() -> None:
    chunked, whole = stall(250), stall(4000)
    decode_s = 0.010 + 8 * 0.001
    assert chunked.gap_before_s == pytest.approx(decode_s)
    assert chunked.longest_gap_s == pytest.approx(decode_s + 250 * 0.0005)
    assert whole.longest_gap_s == pytest.approx(decode_s + 4000 * 0.0005)
    assert chunked.newcomer_ttft_s > whole.newcomer_ttft_s  # the price
    assert chunked.tokens_per_s > 5 * whole.tokens_per_s
