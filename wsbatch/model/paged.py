"""The model of continuous batching: runs ragged steps over a paged KV pool (`steps.PagedStep`)."""

import logging
import time
import traceback
from typing import Literal

import torch
from torch import Tensor

from wsbatch.messages import SamplingParams, TokenLogprobs
from wsbatch.model.compiled import KernelsUnavailable
from wsbatch.model.fused import PARTS, FusedRunner
from wsbatch.model.levels import choose
from wsbatch.model.loading import LoadedModel
from wsbatch.model.modules import ModulesRunner, refusal
from wsbatch.model.positions import check_positions
from wsbatch.model.probe import Probe
from wsbatch.model.ragged import Ragged, flatten
from wsbatch.model.sampling import BROKEN_LOGITS, for_the_kernels, plain_greedy, sample
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
        kernel_level: the instructions that the fused runner is compiled for; auto: the fastest that the machine has.
        graphs: on CUDA, capture graphs of decode steps.

    Raises ValueError, naming the reason, for an architecture that cannot run ragged paged steps, for rows so long that
    their position encoding depends on each other, for `runner="fused"` where it cannot run, and for a `kernel_level`
    that this machine lacks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        total_blocks: int,
        block_tokens: int,
        runner: RunnerName = "auto",
        kernel_level: str = "auto",
        graphs: bool = True,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens} is below 1")
        check_positions(loaded.model, loaded.info.max_model_len)
        self._info = loaded.info
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self._level = choose(kernel_level)
        self._runner = self._choose(loaded, runner, graphs)
        _log.info("continuous batching runs on the %s runner (kernels: %s)", self._runner.name, self._level.name)

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
                fused = FusedRunner(loaded.model, **sizes, threads=torch.get_num_threads(), level=self._level)
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
        self._check(ragged)
        sampling = [row.sampling for row in plan.rows if row.sampling is not None]
        wanted = [not plain_greedy(row) for row in sampling]
        ids, logits, broken = self._forward(ragged, wanted)
        logprobs = self._sample(ids, logits, sampling, wanted, ragged) if any(wanted) else None
        failed = _failed(plan, ids, broken)
        token_ids = tuple([max(token, 0) for token in ids])
        return StepResult(token_ids, logprobs, (time.perf_counter() - began) * 1e3, failed)

    def _check(self, ragged: Ragged) -> None:
        """Refuse what would fail in the middle of a step, or, on a GPU, take the device down with it."""
        least, most = int(ragged.token_ids.min(initial=0)), int(ragged.token_ids.max(initial=0))
        if least < 0 or most >= self._info.vocab_size:
            raise ValueError(f"a token id is outside 0..{self._info.vocab_size - 1}")
        if int(ragged.kv_lens.max(initial=0)) > self._info.max_model_len:
            raise ValueError(f"a row is longer than max_model_len={self._info.max_model_len}")

    def _forward(self, ragged: Ragged, wanted: list[bool]) -> tuple[list[int], Tensor, list[int]]:
        """`ModulesRunner.run`. An error for want of memory holds none of it."""
        try:
            return self._runner.run(ragged, wanted)
        except torch.OutOfMemoryError as error:
            # Whoever keeps the error keeps its frames, and with them the tensors that filled the memory.
            traceback.clear_frames(error.__traceback__)
            raise

    def _sample(
        self, ids: list[int], logits: Tensor, sampling: list[SamplingParams], wanted: list[bool], ragged: Ragged
    ) -> tuple[TokenLogprobs | None, ...] | None:
        """Put the tokens of the wanted rows, chosen from their logits, into `ids`.

        Returns the log probabilities that rows asked for; None where none did.

        Args:
            ids: S, one a sampling row.
            logits: [wanted rows, V].
            sampling, wanted: S each.
        """
        indices = [index for index, want in enumerate(wanted) if want]
        lengths: list[int] = (ragged.positions[ragged.sample_at[indices]] + 1).tolist()
        rows = [sampling[index] for index in indices]
        if isinstance(self._runner, FusedRunner) and all(map(for_the_kernels, rows)):
            drawn, asked = self._runner.sample(logits, rows, lengths)
        else:
            drawn, asked = sample(logits, rows, lengths)
        for index, token in zip(indices, drawn, strict=True):
            ids[index] = token
        if asked is None:
            return None
        by_row = dict(zip(indices, asked, strict=True))
        return tuple([by_row.get(index) for index in range(len(ids))])


def _failed(plan: PagedStep, ids: list[int], broken: list[int]) -> dict[int, str]:
    """Why, by key, the rows failed whose numbers are not finite: in the cache, or in the logits."""
    keys = [row.key for row in plan.rows if row.sampling is not None]
    failed = {plan.rows[index].key: BROKEN_CACHE for index in broken}
    return failed | {key: BROKEN_LOGITS for key, token in zip(keys, ids, strict=True) if token < 0}
