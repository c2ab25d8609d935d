"""The model of continuous batching: runs ragged steps over a paged KV pool (`steps.PagedStep`)."""

import time
from typing import Any

import torch

from wsbatch.messages import TokenLogprobs
from wsbatch.model.modules import ModulesRunner
from wsbatch.model.ragged import flatten
from wsbatch.steps import ModelInfo, PagedStep, StepPlan, StepResult


class PagedModel:
    """A `steps.Model` for `PagedStep` plans. The scheduler owns the blocks; this class only reads block tables.

    Args:
        loaded: the model and its facts, from `loading.load`.
        total_blocks: KV blocks in the pool, numbered from 0.
        block_tokens: tokens a block holds.

    Raises ValueError, naming the reason, for an architecture that cannot run ragged paged steps.
    """

    def __init__(self, loaded: Any, *, total_blocks: int, block_tokens: int) -> None:
        self._info: ModelInfo = loaded.info
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self._runner = ModulesRunner(
            loaded.model,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            max_model_len=loaded.info.max_model_len,
        )

    @property
    def info(self) -> ModelInfo:
        """Facts fixed at load."""
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """Run one ragged step. Raises TypeError for a padded plan, ValueError for a row its blocks do not cover."""
        if not isinstance(plan, PagedStep):
            raise TypeError(f"a paged model runs PagedStep plans, not {type(plan).__name__}")
        began = time.perf_counter()
        ragged = flatten(plan, block_tokens=self._block_tokens, total_blocks=self._total_blocks)
        logits = self._runner.logits(ragged)
        ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if logits is not None:
            ids = tuple(torch.argmax(logits, dim=-1).tolist())
        return StepResult(token_ids=ids, logprobs=logprobs, model_ms=(time.perf_counter() - began) * 1e3)
