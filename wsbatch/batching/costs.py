"""What a step costs: in slots; and in seconds, tau + alpha * decode rows + beta * prompt tokens, fitted in service."""

from dataclasses import dataclass

_FORGET = 0.995
_LEAST_STEPS = 8
_GUESSED_TOKEN_S = 0.050
_GROWTH = 8
_FITTED_LEAST_TOKENS = 16


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


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Seconds: of a step, of a decode row in it, of a prompt token in it."""

    tau_s: float
    alpha_s: float
    beta_s: float

    def step_s(self, *, decode_rows: int, prefill_tokens: int) -> float:
        """Predicted seconds of such a step."""
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

    def fitted(self) -> FittedCosts | None:
        """The costs as the recent steps tell them; None before enough steps were seen."""
        if self._steps < _LEAST_STEPS:
            return None
        return FittedCosts(*(max(0.0, cost) for cost in _solve(self._normal, self._moments)))


class PrefillBound:
    """How many prompt tokens a step may carry so that it takes about `limit_s` at most: a step cannot be interrupted.

    Until costs are fitted, a prompt token is taken to cost 50 ms, and then no step may be more than eight times as long
    as one that was seen to be in time. From then on the fitted costs say. They are slow to learn that tokens have
    become dearer (a longer context, a busier machine), so after a step that took too long the next one is as much
    smaller, and they grow from there as at first.
    """

    def __init__(self, limit_s: float, costs: StepCostFit) -> None:
        self._limit_s = limit_s
        self._costs = costs
        self._seen_tokens = limit_s / _GUESSED_TOKEN_S
        self._trusted = True  # the fitted costs, until a step took too long by them

    def __repr__(self) -> str:
        return f"<PrefillBound {self._limit_s:g} s, seen {self._seen_tokens:.0f} tokens, trusted {self._trusted}>"

    def record(self, cost: StepCost) -> None:
        """Learn from one step."""
        if not cost.prefill_tokens:
            return
        in_time = cost.prefill_tokens * min(_GROWTH, self._limit_s / max(cost.seconds, 1e-9))
        if cost.seconds > self._limit_s:
            self._trusted = False
            self._seen_tokens = in_time
        else:
            self._seen_tokens = max(self._seen_tokens, in_time)

    def tokens(self, *, decode_rows: int) -> int:
        """The most prompt tokens beside so many decodes; at least 1."""
        bound = self._seen_tokens
        costs = self._costs.fitted()
        if costs is not None and costs.beta_s > 0:
            # A single slow step, as the first one often is, may make all others look impossible for a while.
            fitted = max(_FITTED_LEAST_TOKENS, costs.prefill_tokens(self._limit_s, decode_rows=decode_rows))
            bound = fitted if self._trusted else min(bound, fitted)
        return max(1, int(bound))


def choose_chunk(itl_slo_s: float, costs: FittedCosts, *, rows: int, block_tokens: int = 16) -> int:
    """The most prompt tokens a step may carry beside `rows` decodes so that it takes at most `itl_slo_s`.

    At least one block: less would cost a prompt more steps than it saves its neighbours. ValueError where the decodes
    alone take longer than the SLO, or where a prompt token costs nothing.
    """
    if costs.beta_s <= 0:
        raise ValueError(f"beta_s is {costs.beta_s}: must be above 0")
    tokens = costs.prefill_tokens(itl_slo_s, decode_rows=rows)
    if tokens < 0:
        decode_s = costs.step_s(decode_rows=rows, prefill_tokens=0)
        raise ValueError(f"itl_slo_s is {itl_slo_s}: must be at least {decode_s:.6g}, a step of {rows} decodes alone")
    return max(block_tokens, int(tokens))


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
