"""A line through step times: S = tau + alpha * decode rows + beta * prompt tokens, with intervals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

import numpy as np

from wsbatch.model.simulated import StepCosts
from wsbatch_bench.quantiles import Interval, observed_quantile

_RESAMPLES = 400


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
    def costs(self) -> StepCosts:
        """For the simulated model; what noise made negative is 0."""
        return StepCosts(
            tau_s=max(0.0, self.tau_s.value), alpha_s=max(0.0, self.alpha_s.value), beta_s=max(0.0, self.beta_s.value)
        )

    def step_s(self, decode_rows: int, prompt_tokens: int = 0) -> float:
        """The line."""
        return self.tau_s.value + self.alpha_s.value * decode_rows + self.beta_s.value * prompt_tokens


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
    errors = [
        (fitted[0] + fitted[1] * each.decode_rows + fitted[2] * each.prompt_tokens) / each.seconds - 1
        for each in samples
    ]
    return StepFit(tau_s, alpha_s, beta_s, rms_error=sqrt(fmean(error * error for error in errors)))


def _solve(samples: Sequence[StepSample]) -> list[float]:
    rows = np.array([(1.0, each.decode_rows, each.prompt_tokens) for each in samples])  # [N, 3]
    seconds = np.array([each.seconds for each in samples])  # [N]
    solution, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones_like(seconds), rcond=None)
    return [float(value) for value in solution]
