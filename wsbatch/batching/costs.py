"""What a step costs: in slots; and in seconds, by one model, tau + alpha * decode rows + beta * prompt tokens."""

from dataclasses import dataclass

_FORGET = 0.995
_LEAST_STEPS = 8


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step computed.

    Attributes:
        rows: rows in the step.
        prefill_tokens: token slots of prompts, padding and recomputation included.
        useful_prefill_tokens: of those, prompt tokens computed for the first time, for somebody who still waits.
        decode_slots: rows that decoded, finished ones included.
        useful_decode_slots: of those, rows whose token somebody asked for.
        seconds: time in the model.
    """

    rows: int
    prefill_tokens: int
    useful_prefill_tokens: int
    decode_slots: int
    useful_decode_slots: int
    seconds: float

    @property
    def issued_tokens(self) -> int:
        """Token slots computed."""
        return self.prefill_tokens + self.decode_slots

    @property
    def useful_tokens(self) -> int:
        """Of the issued, the ones somebody asked for."""
        return self.useful_prefill_tokens + self.useful_decode_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What steps cost in seconds: as fitted in service, as measured by the bench, or as assumed of a simulated model.

    Attributes:
        tau_s: of a step.
        alpha_s: of a decode row in it.
        beta_s: of a prompt token in it, padding included.
    """

    tau_s: float
    alpha_s: float
    beta_s: float

    def step_s(self, *, decode_rows: int, prefill_tokens: int) -> float:
        """Seconds of such a step."""
        return self.tau_s + self.alpha_s * decode_rows + self.beta_s * prefill_tokens

    def prefill_tokens(self, limit_s: float, *, decode_rows: int) -> float:
        """Prompt tokens that a step of `limit_s` has time for beside these rows; below 0 where they take longer alone.

        `beta_s` must be above 0.
        """
        return (limit_s - self.step_s(decode_rows=decode_rows, prefill_tokens=0)) / self.beta_s


class StepCostFit:
    """Least squares over the recent steps, older ones forgotten geometrically.

    A faint prior of zero costs keeps the equations solvable while all steps look alike; negative costs, which noise can
    fit, are clamped to zero at prediction.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._normal = [[1e-6 if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._moments = [0.0, 0.0, 0.0]

    def record(self, cost: StepCost) -> None:
        """Learn from one step."""
        features = (1.0, float(cost.decode_slots), float(cost.prefill_tokens))
        self._steps += 1
        for row in range(3):
            for column in range(3):
                self._normal[row][column] = self._normal[row][column] * _FORGET + features[row] * features[column]
            self._moments[row] = self._moments[row] * _FORGET + features[row] * cost.seconds

    def fitted(self) -> CostModel | None:
        """The costs as the recent steps tell them; None before enough steps were seen."""
        if self._steps < _LEAST_STEPS:
            return None
        tau_s, alpha_s, beta_s = (max(0.0, cost) for cost in _solve(self._normal, self._moments))
        return CostModel(tau_s=tau_s, alpha_s=alpha_s, beta_s=beta_s)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gauss-Jordan elimination with partial pivoting, 3x3; a vanishing pivot leaves its unknown at zero."""
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        if abs(rows[pivot][pivot]) < 1e-12:
            continue
        for row in range(size):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [value - factor * other for value, other in zip(rows[row], rows[pivot], strict=True)]
    return [rows[i][size] / rows[i][i] if abs(rows[i][i]) >= 1e-12 else 0.0 for i in range(size)]
