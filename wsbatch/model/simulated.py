"""A model without torch: deterministic tokens, step times from a cost model.

The thread worker runs it in real time (`run` sleeps); the virtual-time worker asks for `step_s` and `compute` instead.
Like a language model's, each token is a function of the tokens before it, so that a scheduler which loses, repeats or
mixes up tokens or blocks changes the text; and, where sampled, of (seed, position), so that runs can be resumed.
"""

import time
from dataclasses import dataclass

from wsbatch.batching.costs import CostModel
from wsbatch.messages import SamplingParams, TokenLogprobs
from wsbatch.steps import ModelInfo, PaddedDecode, PaddedStart, PagedStep, StepPlan, StepResult

DEFAULT_COSTS = CostModel(tau_s=0.010, alpha_s=0.001, beta_s=0.0005)

EOS_ID = 256
_FIRST_ID, _LAST_ID = 0x20, 0x7E  # printable ASCII: the simulated codec's ids are bytes
_MEMORY = 4  # a token depends on this many tokens before it
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Row:
    tokens: list[int]
    sampling: SamplingParams


class SimulatedModel:
    """Implements `Model` for padded and paged plans."""

    def __init__(self, costs: CostModel = DEFAULT_COSTS, *, max_model_len: int = 8192, block_tokens: int = 16) -> None:
        self.costs = costs
        self._block_tokens = block_tokens
        self._rows: list[_Row] = []
        self._pool: dict[int, int] = {}  # paged: token id by its place in the pool
        self._info = ModelInfo(
            name="simulated",
            revision="simulated-1",
            dtype="float32",
            device="cpu",
            max_model_len=max_model_len,
            vocab_size=EOS_ID + 1,
            eos_token_ids=frozenset({EOS_ID}),
        )

    @property
    def info(self) -> ModelInfo:
        """Facts fixed at load."""
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """Sleep for the step's time, then compute it."""
        time.sleep(self.step_s(plan))
        return self.compute(plan)

    def step_s(self, plan: StepPlan) -> float:
        """How long this plan takes, by the cost model."""
        match plan:
            case PaddedStart(rows=rows):
                longest = max(len(row.token_ids) for row in rows)
                return self.costs.step_s(decode_rows=0, prefill_tokens=longest * len(rows))
            case PaddedDecode(keep=keep):
                return self.costs.step_s(decode_rows=len(self._rows if keep is None else keep), prefill_tokens=0)
            case PagedStep(rows=paged_rows):
                decodes = sum(len(row.token_ids) == 1 for row in paged_rows)
                prompt = sum(len(row.token_ids) for row in paged_rows if len(row.token_ids) > 1)
                return self.costs.step_s(decode_rows=decodes, prefill_tokens=prompt)

    def compute(self, plan: StepPlan) -> StepResult:
        """The step's tokens, at once."""
        if isinstance(plan, PagedStep):
            return self._compute_paged(plan)
        seconds = self.step_s(plan)
        match plan:
            case PaddedStart(rows=rows):
                self._rows = [_Row(list(row.token_ids), row.sampling) for row in rows]
            case PaddedDecode(keep=keep) if keep is not None:
                self._rows = [self._rows[index] for index in keep]
        ids = []
        for row in self._rows:
            ids.append(_next_id(row.tokens[-_MEMORY:], len(row.tokens), row.sampling))
            row.tokens.append(ids[-1])
        return _result(ids, [row.sampling for row in self._rows], seconds)

    def _compute_paged(self, plan: PagedStep) -> StepResult:
        ids, samplings = [], []
        for row in plan.rows:
            places = [
                row.block_table[position // self._block_tokens] * self._block_tokens + position % self._block_tokens
                for position in range(max(0, row.start - _MEMORY), row.start + len(row.token_ids))
            ]
            self._pool.update(zip(places[-len(row.token_ids) :], row.token_ids, strict=True))
            if row.sampling is not None:
                memory = [self._pool.get(place, -1) for place in places[-_MEMORY:]]
                ids.append(_next_id(memory, row.start + len(row.token_ids), row.sampling))
                samplings.append(row.sampling)
        return _result(ids, samplings, self.step_s(plan))


def _next_id(memory: list[int], position: int, sampling: SamplingParams) -> int:
    """A printable byte from the last tokens, the position, and the seed where the row is sampled."""
    state = position
    for token in memory:
        state = (state * 0x9E3779B97F4A7C15 + token + 1) & _MASK
    if sampling.temperature > 0:
        state = (state ^ ((sampling.seed or 0) * 0xBF58476D1CE4E5B9)) & _MASK
    state = ((state ^ (state >> 31)) * 0x94D049BB133111EB) & _MASK
    return _FIRST_ID + (state >> 33) % (_LAST_ID - _FIRST_ID + 1)


def _result(ids: list[int], samplings: list[SamplingParams], seconds: float) -> StepResult:
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    if any(sampling.logprobs is not None for sampling in samplings):
        logprobs = tuple(
            None
            if sampling.logprobs is None
            else (-0.5, tuple(((token + rank) % EOS_ID, -0.5 - rank) for rank in range(sampling.logprobs)))
            for token, sampling in zip(ids, samplings, strict=True)
        )
    return StepResult(tuple(ids), logprobs, seconds * 1000)
