"""How a step's time grows with the batch: goodput, speed-up, efficiency and the knee, with the fitted line."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median

import numpy as np

from wsbatch.batching.costs import CostModel
from wsbatch.batching.scheduler import Scheduler
from wsbatch.messages import SamplingParams
from wsbatch_bench.quantiles import Interval, observed_quantile
from wsbatch_bench.sampling import GREEDY
from wsbatch_bench.steps.bare_loop import Clock, LoopRequest, LoopRun, Runs, run_loop, sampled

_RESAMPLES = 400

_SKIP = 2  # steps after a change of the batch's shape, in which memory is still being found

_MEASURED, _FITTED, _IDEAL = "#0072b2", "#d55e00", "#888888"


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    decode_rows: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFit:
    """The fitted costs in seconds with 95 % intervals, and how far the line is off.

    Attributes:
        rms_error: root mean square of the relative errors over the samples.
    """

    tau_s: Interval
    alpha_s: Interval
    beta_s: Interval
    rms_error: float

    @property
    def costs(self) -> CostModel:
        """The fitted costs; what noise made negative is 0."""
        return _costs(self.tau_s.value, self.alpha_s.value, self.beta_s.value)

    def decode_s(self, rows: int) -> float:
        """Seconds of a step in which so many rows decode, by the fitted costs."""
        return self.costs.step_s(decode_rows=rows, prefill_tokens=0)


def fit_steps(samples: Sequence[StepSample], *, seed: int = 0) -> StepFit:
    """Least squares of the relative error, so that short steps count as much as long ones; bootstrap intervals.

    The bootstrap draws within each kind of step (rows and prompt tokens alike), so that none is lost. Costs that the
    samples cannot tell (no prompt token in any) are 0. Raises ValueError for fewer than two kinds.
    """
    kinds: dict[tuple[int, int], list[StepSample]] = {}
    for sample in samples:
        kinds.setdefault((sample.decode_rows, sample.prompt_tokens), []).append(sample)
    if len(kinds) < 2:
        raise ValueError(f"{len(kinds)} kinds of steps: a line needs at least 2")
    fitted = _solve(samples)
    rng = random.Random(seed)
    resampled = [
        _solve([each for own in kinds.values() for each in rng.choices(own, k=len(own))]) for _ in range(_RESAMPLES)
    ]
    tau_s, alpha_s, beta_s = (
        Interval(
            fitted[index],
            observed_quantile([each[index] for each in resampled], 0.025),
            observed_quantile([each[index] for each in resampled], 0.975),
        )
        for index in range(3)
    )
    costs = _costs(*fitted)
    errors = [
        costs.step_s(decode_rows=each.decode_rows, prefill_tokens=each.prompt_tokens) / each.seconds - 1
        for each in samples
    ]
    return StepFit(tau_s, alpha_s, beta_s, rms_error=sqrt(fmean(error * error for error in errors)))


def _costs(tau_s: float, alpha_s: float, beta_s: float) -> CostModel:
    return CostModel(tau_s=max(0.0, tau_s), alpha_s=max(0.0, alpha_s), beta_s=max(0.0, beta_s))


def _solve(samples: Sequence[StepSample]) -> list[float]:
    rows = np.array([(1.0, each.decode_rows, each.prompt_tokens) for each in samples])  # [N, 3]
    seconds = np.array([each.seconds for each in samples])  # [N]
    solution, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones_like(seconds), rcond=None)
    return [float(value) for value in solution]


MakePrompt = Callable[[int, int], tuple[int, ...]]
"""(index, tokens) to a prompt; prompts of different indices differ."""


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One batch size, decoding.

    Attributes:
        step_s: median seconds of a step.
        goodput: tokens a second.
        speedup: goodput over that of the smallest size measured; `efficiency` that over the ratio of the sizes.
    """

    batch: int
    step_s: float
    goodput: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Scaling:
    """A measured curve.

    Attributes:
        points: by batch size.
        fit: the line through all steps, prefill ones included.
        samples: every step that was used.
        outputs: the tokens of each size's rows in its first round, to be checked against the server's own.
    """

    points: list[ScalePoint]
    fit: StepFit
    samples: list[StepSample]
    outputs: dict[int, list[list[int]]]

    def knee(self, efficiency: float) -> int | None:
        """The largest measured size whose efficiency is at least this; None where even the smallest is below."""
        return max((point.batch for point in self.points if point.efficiency >= efficiency), default=None)


def measure_scaling(
    model: Runs,
    make_scheduler: Callable[[int], Scheduler],
    *,
    sizes: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    clock: Clock,
    make_prompt: MakePrompt,
    samplings: Sequence[SamplingParams] = (GREEDY,),
    seed: int = 0,
) -> list[Scaling]:
    """Run batches of every size, in a new random order each round, so that drift of the machine spreads over all.

    A curve for each of `samplings`; each size is measured with all of them, one after the other.
    `make_scheduler` makes one for a batch size. `make_prompt(index, tokens)` gives prompts that differ. Prompts of a
    quarter of the length and of twice it are prefilled alone, too, to tell what a prompt token costs. ValueError: a
    batch of which some rows end before others begin.
    """
    rng = random.Random(seed)
    samples: list[list[StepSample]] = [[] for _ in samplings]
    outputs: list[dict[int, list[list[int]]]] = [{} for _ in samplings]
    for _ in range(rounds):
        for size in rng.sample(sorted(set(sizes)), len(set(sizes))):
            requests = batch_requests(size, prompt_tokens, output_tokens, make_prompt)
            for index, sampling in enumerate(samplings):
                run = run_loop(model, make_scheduler(size), sampled(requests, sampling), clock=clock)
                samples[index] += _samples(run, size)
                outputs[index].setdefault(size, [row.token_ids for row in run.rows])
        for tokens in (max(1, prompt_tokens // 4), 2 * prompt_tokens):
            request = LoopRequest(make_prompt(tokens, tokens), 1)
            for index, sampling in enumerate(samplings):
                run = run_loop(model, make_scheduler(1), sampled([request], sampling), clock=clock)
                samples[index] += _samples(run, 1)
    points = [_points(each, sorted(set(sizes))) for each in samples]
    return [Scaling(*each) for each in zip(points, map(fit_steps, samples), samples, outputs, strict=True)]


def batch_requests(size: int, prompt_tokens: int, output_tokens: int, make_prompt: MakePrompt) -> list[LoopRequest]:
    """What `measure_scaling` runs as a batch of this size."""
    return [LoopRequest(make_prompt(index, prompt_tokens), output_tokens) for index in range(size)]


def _samples(run: LoopRun, size: int) -> list[StepSample]:
    """Steps of prefill alone, and steps in which the whole batch decodes."""
    samples = []
    settled = 0
    for step in run.steps:
        cost = step.cost
        settled = settled + 1 if cost.decode_slots == size and not cost.prefill_tokens else 0
        if settled > _SKIP or (cost.prefill_tokens and not cost.decode_slots):
            samples.append(StepSample(cost.decode_slots, cost.prefill_tokens, step.end_s - step.start_s))
    return samples


def _points(samples: Sequence[StepSample], sizes: Sequence[int]) -> list[ScalePoint]:
    step_s = {}
    for size in sizes:
        seconds = [each.seconds for each in samples if each.decode_rows == size and not each.prompt_tokens]
        if not seconds:
            raise ValueError(f"no step in which all {size} rows decode: more output_tokens are needed")
        step_s[size] = median(seconds)
    first = sizes[0]
    points = []
    for size in sizes:
        speedup = (size / step_s[size]) / (first / step_s[first])
        points.append(ScalePoint(size, step_s[size], size / step_s[size], speedup, speedup * first / size))
    return points


def draw_scaling(scaling: Scaling, paths: Sequence[Path], *, efficiency: float, title: str) -> None:
    """Left: milliseconds a decode step. Right: tokens a second and the efficiency, the knee marked."""
    # Here, because matplotlib takes a second to import.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    steps, rates = figure.subplots(1, 2)
    sizes = [point.batch for point in scaling.points]
    fit = scaling.fit
    steps.plot(sizes, [1000 * p.step_s for p in scaling.points], "o-", color=_MEASURED, label="measured, median")
    steps.plot(
        sizes, [1000 * fit.decode_s(size) for size in sizes], "--", color=_FITTED,
        label=f"τ + αb: τ = {1000 * fit.tau_s.value:.1f} ms, α = {1000 * fit.alpha_s.value:.2f} ms",
    )  # fmt: skip
    steps.set_ylabel("decode step, ms")
    steps.set_ylim(bottom=0)
    first = scaling.points[0]
    rates.plot(sizes, [p.goodput for p in scaling.points], "o-", color=_MEASURED, label="measured")
    ideal = [first.goodput * size / first.batch for size in sizes]
    rates.plot(sizes, ideal, ":", color=_IDEAL, label="if a step cost the same at any size")
    rates.set_yscale("log")
    rates.set_ylabel("output tokens/s (log scale)")
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for point in scaling.points:
        rates.annotate(
            f"{point.efficiency:.0%}", (point.batch, point.goodput), xytext=(0, -14), textcoords="offset points",
            ha="center", fontsize=8, color="#444444",
        )  # fmt: skip
    knee = scaling.knee(efficiency)
    if knee is not None:
        rates.axvline(knee, color=_FITTED, linewidth=1)
        rates.annotate(
            f"knee: {knee} is the largest\nwith efficiency ≥ {efficiency:.0%}", (knee, 0.04),
            xycoords=("data", "axes fraction"), xytext=(-6, 0), textcoords="offset points", ha="right", fontsize=9,
            color=_FITTED,
        )  # fmt: skip
    for axes in (steps, rates):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("batch size")
        axes.grid(visible=True, color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    rates.margins(y=0.15)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=110)
