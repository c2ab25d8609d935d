"""How a step's time grows with the batch: goodput, speed-up, efficiency and the knee, with the fitted line."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from wsbatch.batching.scheduler import Scheduler
from wsbatch_bench.bare_loop import Clock, LoopRequest, LoopRun, Runs, run_loop
from wsbatch_bench.step_fit import StepFit, StepSample, fit_steps

MakePrompt = Callable[[int, int], tuple[int, ...]]
"""(index, tokens) to a prompt; prompts of different indices differ."""

_SKIP = 2  # steps after a change of the batch's shape, in which memory is still being found


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
    seed: int = 0,
) -> Scaling:
    """Run batches of every size, in a new random order each round, so that drift of the machine spreads over all.

    `make_scheduler` makes one for a batch size. `make_prompt(index, tokens)` gives prompts that differ. Prompts of a
    quarter of the length and of twice it are prefilled alone, too, to tell what a prompt token costs. ValueError: a
    batch of which some rows end before others begin.
    """
    rng = random.Random(seed)
    samples: list[StepSample] = []
    outputs: dict[int, list[list[int]]] = {}
    for _ in range(rounds):
        for size in rng.sample(sorted(set(sizes)), len(set(sizes))):
            requests = batch_requests(size, prompt_tokens, output_tokens, make_prompt)
            run = run_loop(model, make_scheduler(size), requests, clock=clock)
            samples += _samples(run, size)
            outputs.setdefault(size, [row.token_ids for row in run.rows])
        for tokens in (max(1, prompt_tokens // 4), 2 * prompt_tokens):
            request = LoopRequest(make_prompt(tokens, tokens), 1)
            samples += _samples(run_loop(model, make_scheduler(1), [request], clock=clock), 1)
    return Scaling(_points(samples, sorted(set(sizes))), fit_steps(samples), samples, outputs)


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
