"""The model of continuous batching: runs ragged steps over a paged KV pool (`steps.PagedStep`)."""

import logging
import time
import traceback
from typing import Literal

import torch

from wsbatch.messages import SamplingParams
from wsbatch.model.compiled import KernelsUnavailable
from wsbatch.model.fused import PARTS, FusedRunner
from wsbatch.model.loading import LoadedModel
from wsbatch.model.modules import ModulesRunner, refusal
from wsbatch.model.positions import check_positions
from wsbatch.model.probe import Probe
from wsbatch.model.ragged import flatten
from wsbatch.model.sampling import BROKEN_LOGITS, sample
from wsbatch.steps import ModelInfo, PagedStep, StepPlan, StepResult

_log = logging.getLogger("wsbatch.model")

BROKEN_CACHE = "a key or a value of the row is not finite"

RunnerName = Literal["auto", "fused", "modules"]


class PagedModel:
    """A `steps.Model` for `PagedStep` plans. The scheduler owns the blocks; this class only reads block tables.

    Two runners compute a step: `fused`, one C++ call for Llama-shaped models on CPU, and `modules`, the reference on
    transformers' own modules. Both are compared with the model's own forward at load.

    Args:
        loaded: the model and its facts, from `loading.load`.
        total_blocks: KV blocks in the pool, numbered from 0.
        block_tokens: tokens a block holds; the fused runner needs a multiple of 16.
        runner: auto takes `fused` where it can run, and logs why where it cannot.
        graphs: on CUDA, capture graphs of decode steps.

    Raises ValueError, naming the reason, for an architecture that cannot run ragged paged steps, for rows so long that
    their position encoding depends on each other, and for `runner="fused"` where it cannot run.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        total_blocks: int,
        block_tokens: int,
        runner: RunnerName = "auto",
        graphs: bool = True,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens} is below 1")
        check_positions(loaded.model, loaded.info.max_model_len)
        self._info = loaded.info
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self._runner = self._choose(loaded, runner, graphs)
        _log.info("continuous batching runs on the %s runner", self._runner.name)

    def _choose(self, loaded: LoadedModel, name: RunnerName, graphs: bool) -> FusedRunner | ModulesRunner:
        sizes = {
            "total_blocks": self._total_blocks,
            "block_tokens": self._block_tokens,
            "max_model_len": loaded.info.max_model_len,
        }
        probe = Probe.of(loaded.model, **sizes)
        check = {"dtype": loaded.model.dtype, "block_tokens": self._block_tokens}
        if name != "modules":
            try:
                fused = FusedRunner(loaded.model, **sizes, threads=torch.get_num_threads())
                wrong = probe.differs(fused.run, **check)
                if wrong is None:
                    return fused
                fused.close()
                raise KernelsUnavailable(wrong)
            except KernelsUnavailable as error:
                if name == "fused":
                    raise ValueError(f"runner='fused' cannot run: {error}") from error
                _log.warning("the fused runner cannot run here, the modules runner takes its place: %s", error)
        own = loaded.model.config._attn_implementation
        try:
            modules = ModulesRunner(loaded.model, **sizes, graphs=graphs)
            wrong = probe.differs(modules.run, **check)
            if wrong is not None and modules.simplify():
                _log.warning("variable-length attention is wrong here, plain torch replaces it: %s", wrong)
                wrong = probe.differs(modules.run, **check)
            for setting, tokens in probe.unseen.items():
                if setting != "sliding_window":  # the runner has seen that it reaches the attention function
                    wrong = wrong or f"what happens beyond {setting}={tokens} tokens cannot be checked"
            if wrong is not None:
                raise refusal(loaded.model, wrong)
        except ValueError:
            loaded.model.set_attn_implementation(own)  # it may still be served another way
            raise
        return modules

    @property
    def info(self) -> ModelInfo:
        """Facts fixed at load."""
        return self._info

    @property
    def runner(self) -> str:
        """The runner that was chosen: fused, or modules and what they run on."""
        return self._runner.name

    def breakdown_ms(self) -> dict[str, float]:
        """Milliseconds by part of the step since the last call; all 0 where the runner does not tell them apart."""
        if isinstance(self._runner, FusedRunner):
            return self._runner.breakdown_ms()
        return dict.fromkeys(PARTS, 0.0)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one ragged step.

        A row whose numbers are not finite is named in the result's `failed`, and changes nothing for the others. Raises
        TypeError for a padded plan, ValueError for a row its blocks do not cover or with a token id outside the
        vocabulary, torch.OutOfMemoryError where the device has no memory left for it.
        """
        if not isinstance(plan, PagedStep):
            raise TypeError(f"a paged model runs PagedStep plans, not {type(plan).__name__}")
        began = time.perf_counter()
        ragged = flatten(plan, block_tokens=self._block_tokens, total_blocks=self._total_blocks)
        if (
            not 0
            <= int(ragged.token_ids.min(initial=0))
            <= int(ragged.token_ids.max(initial=0))
            < self._info.vocab_size
        ):
            raise ValueError(f"a token id is outside 0..{self._info.vocab_size - 1}")
        if int(ragged.kv_lens.max(initial=0)) > self._info.max_model_len:
            raise ValueError(f"a row is longer than max_model_len={self._info.max_model_len}")
        sampling = [row.sampling for row in plan.rows if row.sampling is not None]
        wanted = [row.temperature > 0 or row.logprobs is not None for row in sampling]
        try:
            ids, logits, broken = self._runner.run(ragged, wanted)
        except torch.OutOfMemoryError as error:
            # Whoever keeps the error keeps its frames, and with them the tensors that filled the memory.
            traceback.clear_frames(error.__traceback__)
            raise
        logprobs = None
        if any(wanted):
            rows: list[SamplingParams] = [row for row, want in zip(sampling, wanted, strict=True) if want]
            places = [int(at) for at, want in zip(ragged.positions[ragged.sample_at] + 1, wanted, strict=True) if want]
            drawn, asked = sample(logits, rows, places)
            sampled = [index for index, want in enumerate(wanted) if want]
            for index, token in zip(sampled, drawn, strict=True):
                ids[index] = token
            if asked is not None:
                by_row = dict(zip(sampled, asked, strict=True))
                logprobs = tuple(by_row.get(index) for index in range(len(ids)))
        keys = [row.key for row in plan.rows if row.sampling is not None]
        failed = {plan.rows[index].key: BROKEN_CACHE for index in broken}
        failed |= {key: BROKEN_LOGITS for key, token in zip(keys, ids, strict=True) if token < 0}
        return StepResult(
            token_ids=tuple(max(token, 0) for token in ids),
            logprobs=logprobs,
            model_ms=(time.perf_counter() - began) * 1e3,
            failed=failed,
        )
