"""The model of dynamic batching: a batch padded on the left to its longest prompt, run to completion."""

import inspect
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from wsbatch.messages import SamplingParams
from wsbatch.model.loading import LoadedModel
from wsbatch.model.positions import check_positions
from wsbatch.model.sampling import BROKEN_LOGITS, sample
from wsbatch.steps import ModelInfo, PaddedDecode, PaddedStart, StepPlan, StepResult


@dataclass(slots=True)
class _Batch:
    """The current batch: B rows, `columns` of the key-value cache filled, the newest tokens not yet run.

    Attributes:
        mask: [B, columns + tokens still reserved], 0 on padding; each step uses one column more.
        lengths: tokens of each row so far, prompt and output, padding excluded.
        newest: [B, 1], the tokens chosen last; 0 where a row's numbers are not finite.
        keys: of the rows.
        failed: of those whose numbers are not finite.
    """

    cache: Any
    mask: Tensor
    columns: int
    lengths: list[int]
    newest: Tensor
    sampling: list[SamplingParams]
    keys: list[int]
    failed: set[int] = field(default_factory=set)


class PaddedModel:
    """A `steps.Model` for `PaddedStart` and `PaddedDecode` plans, on any causal LM of transformers.

    Rows share one cache; padding is masked and positions count from each row's first token, so a row computes what it
    would compute alone. Which rows have finished is the engine's business: here every row goes on until it is dropped.

    Raises ValueError, naming the reason, for an architecture that left padding would corrupt, and for rows so long that
    their position encoding depends on each other.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._info = loaded.info
        self._batch: _Batch | None = None
        check_positions(loaded.model, loaded.info.max_model_len)
        accepted = inspect.signature(loaded.model.forward).parameters
        # transformers 5.24 renamed the argument, and some architectures keep the old name.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        for name in ("attention_mask", "position_ids", "logits_to_keep", self._cache_name):
            if name not in accepted:
                raise ValueError(f"{type(loaded.model).__name__} cannot be batched: its forward takes no {name}")
        for layer in DynamicCache(config=loaded.model.config).layers:
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(
                    f"{type(loaded.model).__name__} cannot be batched: its {type(layer).__name__} keeps more than "
                    "keys and values, which padding would run through"
                )

    @property
    def info(self) -> ModelInfo:
        """Facts fixed at load."""
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step: a token for every row of the batch.

        A row whose logits are not finite is named in the result's `failed`, once, and changes nothing for the others.

        After a step that raised in the model the batch is gone, and the next plan must be a `PaddedStart`.

        Raises:
            TypeError: not a padded plan.
            ValueError: an empty prompt, a token id outside the vocabulary, `keep` outside the batch, a decode without
                a batch or beyond its `max_new_tokens`. A refused `PaddedDecode` leaves the batch as it was.
        """
        began = time.perf_counter()
        with torch.inference_mode():
            if isinstance(plan, PaddedStart):
                result = self._start(plan)
            elif isinstance(plan, PaddedDecode):
                result = self._decode(plan)
            else:
                raise TypeError(f"a padded model runs PaddedStart and PaddedDecode, not {type(plan).__name__}")
        return replace(result, model_ms=(time.perf_counter() - began) * 1e3)

    def _start(self, plan: PaddedStart) -> StepResult:
        self._batch = None  # before the new one asks for memory
        self._check(plan)
        lengths = [len(row.token_ids) for row in plan.rows]
        width = max(lengths)
        # What is under the padding is masked, but a masked value is still multiplied, by zero. So it is the row's own
        # first token: another one's embedding may be NaN.
        ids = torch.tensor([row.token_ids[:1] * (width - len(row.token_ids)) + row.token_ids for row in plan.rows])
        mask = torch.ones(len(lengths), width + plan.max_new_tokens - 1, dtype=torch.long)
        for index, length in enumerate(lengths):
            mask[index, : width - length] = 0
        positions = (mask[:, :width].cumsum(dim=-1) - 1).clamp(min=0)  # [B, T]
        batch = _Batch(
            cache=DynamicCache(config=self._model.config),
            mask=mask.to(self._info.device),
            columns=0,
            lengths=lengths,
            newest=ids.to(self._info.device),
            sampling=[row.sampling for row in plan.rows],
            keys=[row.key for row in plan.rows],
        )
        return self._step(batch, positions.to(self._info.device))

    def _check(self, plan: PaddedStart) -> None:
        """Refuse what would fail in the middle of a step, or, on a GPU, take the device down with it."""
        if not plan.rows:
            raise ValueError("a padded batch has at least one row")
        if plan.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={plan.max_new_tokens} is below 1")
        for row in plan.rows:
            if not row.token_ids:
                raise ValueError(f"row {row.key} has no prompt tokens")
            if len(row.token_ids) > self._info.max_model_len:
                raise ValueError(
                    f"row {row.key} has {len(row.token_ids)} tokens, over max_model_len={self._info.max_model_len}"
                )
            if min(row.token_ids) < 0 or max(row.token_ids) >= self._info.vocab_size:
                raise ValueError(f"row {row.key} has a token id outside 0..{self._info.vocab_size - 1}")

    def _decode(self, plan: PaddedDecode) -> StepResult:
        batch = self._batch
        if batch is None:
            raise ValueError("there is no padded batch to go on with")
        if batch.columns == batch.mask.shape[1]:
            raise ValueError("the padded batch has generated all of its max_new_tokens")
        keep = list(range(len(batch.lengths)) if plan.keep is None else plan.keep)
        if not keep or keep != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= len(batch.lengths):
            raise ValueError(f"keep={plan.keep} is not an ascending choice of the batch's {len(batch.lengths)} rows")
        self._batch = None  # a step that fails half-way leaves a cache that fits nothing
        if len(keep) < len(batch.lengths):
            _compact(batch, keep)
        # A finished row that keeps its slot may run past the last position, which nobody will read.
        last = self._info.max_model_len - 1
        positions = [[min(length - 1, last)] for length in batch.lengths]
        return self._step(batch, torch.tensor(positions, device=self._info.device))  # [B, 1]

    def _step(self, batch: _Batch, positions: Tensor) -> StepResult:
        """Run `batch.newest` [B, T] at `positions` [B, T], choose the next token of every row; untimed."""
        batch.columns += batch.newest.shape[1]
        output = self._model(
            input_ids=batch.newest,
            attention_mask=batch.mask[:, : batch.columns],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: batch.cache},
        )
        ids, logprobs = sample(output.logits[:, -1], batch.sampling, batch.lengths)  # from [B, V]
        failed = {key for key, token in zip(batch.keys, ids, strict=True) if token < 0} - batch.failed
        batch.failed |= failed
        token_ids = tuple(max(token, 0) for token in ids)
        batch.newest = torch.tensor(token_ids, device=self._info.device)[:, None]
        batch.lengths = [length + 1 for length in batch.lengths]
        self._batch = batch
        found = None if logprobs is None else tuple(logprobs)
        return StepResult(token_ids, found, 0.0, dict.fromkeys(failed, BROKEN_LOGITS))


def _compact(batch: _Batch, keep: list[int]) -> None:
    """Drop all rows but `keep` from the batch, and the columns on the left that only padded the others."""
    rows = torch.tensor(keep, device=batch.mask.device)
    unused = batch.columns - max(batch.lengths[index] - 1 for index in keep)
    batch.columns -= unused
    batch.mask = batch.mask.index_select(0, rows)[:, unused:]
    batch.newest = batch.newest.index_select(0, rows)
    batch.lengths = [batch.lengths[index] for index in keep]
    batch.sampling = [batch.sampling[index] for index in keep]
    batch.keys = [batch.keys[index] for index in keep]
    for layer in batch.cache.layers:
        # A sliding-window layer holds only the last columns; the left ones may already be gone.
        held = min(layer.keys.shape[-2], batch.columns)
        layer.keys = layer.keys[:, :, -held:].index_select(0, rows)  # [B, H, T, D]
        layer.values = layer.values[:, :, -held:].index_select(0, rows)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= unused
