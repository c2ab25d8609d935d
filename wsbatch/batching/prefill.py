"""How many prompt tokens a step may carry: by the settings, by the goal for a decode step, by the time it may take."""

from wsbatch.batching.costs import CostModel, StepCost, StepCostFit

_GUESSED_TOKEN_S = 0.050
_GROWTH = 8
_FITTED_LEAST_TOKENS = 16
_TUNE_STEPS = 16


class PrefillBudget:
    """The prompt tokens of a step of continuous batching.

    Args:
        most_tokens: while no row decodes.
        chunk_tokens: while any row decodes.
        block_tokens: of a KV block, the least that a chosen chunk has.
        costs: of the steps so far.
        itl_slo_s: the goal for a step that decodes: the chunk is chosen anew by the costs, every 16 steps, as they
            drift with the contexts' lengths and with the machine. None: it stays as it is.
        max_step_s: no step is given more prompt tokens than it can compute in this time, as far as the steps so far
            tell; the first ones are small. None: there is no such bound.

    Attributes:
        chunk_tokens: as chosen last.
    """

    def __init__(
        self,
        *,
        most_tokens: int,
        chunk_tokens: int,
        block_tokens: int,
        costs: StepCostFit,
        itl_slo_s: float | None,
        max_step_s: float | None,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self._most_tokens = most_tokens
        self._block_tokens = block_tokens
        self._costs = costs
        self._itl_slo_s = itl_slo_s
        self._bound = None if max_step_s is None else PrefillBound(max_step_s, costs)
        self._steps_to_tune = _TUNE_STEPS

    def tokens(self, *, decode_rows: int) -> int:
        """The most prompt tokens of the next step, beside so many decodes."""
        if self._itl_slo_s is not None and self._steps_to_tune <= 0:
            self._tune(self._itl_slo_s, decode_rows)
        tokens = self.chunk_tokens if decode_rows else self._most_tokens
        return tokens if self._bound is None else min(tokens, self._bound.tokens(decode_rows=decode_rows))

    def record(self, cost: StepCost) -> None:
        """Learn from one step, which `costs` knows already."""
        self._steps_to_tune -= 1
        if self._bound is not None:
            self._bound.record(cost)

    def _tune(self, itl_slo_s: float, decode_rows: int) -> None:
        self._steps_to_tune = _TUNE_STEPS
        costs = self._costs.fitted()
        if costs is None or not costs.beta_s:
            return
        try:
            chunk = choose_chunk(itl_slo_s, costs, rows=decode_rows, block_tokens=self._block_tokens)
        except ValueError:  # the decodes alone take longer: admission refuses newcomers, prompts go on by the block
            chunk = self._block_tokens
        self.chunk_tokens = min(chunk, self._most_tokens)


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


def choose_chunk(itl_slo_s: float, costs: CostModel, *, rows: int, block_tokens: int = 16) -> int:
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
