"""`open_engine`: from a configuration to a running engine, and down again."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.dynamic import DynamicScheduler, DynamicSettings
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.tokenization import PromptTokenizer, Run, in_thread
from wsbatch.engine.worker import ThreadWorker, Worker
from wsbatch.nurseries import background_tasks
from wsbatch.steps import Model, ModelInfo
from wsbatch.text import ByteText, TextCodec

if TYPE_CHECKING:
    from wsbatch.batching.costs import CostModel
    from wsbatch.model.loading import LoadedModel

_STEP_SHARE = 0.1
"""Of `step_stall_s`, what a step that prefills may take: costs are known roughly, and a stalled step is fatal."""
_CUDA_BLOCK_TOKENS = 256  # torch's paged FlashAttention reads blocks of a multiple of it

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total) while a model is fetched or converted, from the model's thread."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig | None = None, *, progress: Progress | None = None
) -> AsyncIterator[BatchEngine]:
    """Load the model and run an engine while the block runs.

    Waits for the model to be loaded and warm. Raises what loading raises (OSError or ValueError, naming the model);
    nothing is left running then. Leaving the block ends what is live with `shutdown` and waits for the step in flight:
    a step that hangs holds it for ever (a thread cannot be killed). If the engine died inside the block, EngineDead
    is raised at its end.
    """
    config = config or EngineConfig()
    worker = ThreadWorker()
    codecs: list[TextCodec] = []  # the thread leaves it here

    def build() -> Model:
        model, codec = _load(config, progress)
        codecs.append(codec)
        return model

    async with background_tasks() as nursery:
        try:
            info: ModelInfo = await nursery.start(worker.run, build)
            engine = assemble(config, info=info, worker=worker, codec=codecs[0])
            nursery.start_soon(engine.run)
            yield engine
            if engine.state == "dead":
                raise await engine.wait_dead()
        finally:
            worker.close()


def assemble(
    config: EngineConfig, *, info: ModelInfo, worker: Worker, codec: TextCodec, run: Run = in_thread
) -> BatchEngine:
    """An engine of its parts; `run` its loop.

    Args:
        config: the settings.
        info: the model's facts.
        worker: runs the model.
        codec: the model's text.
        run: where long texts are tokenized, see `PromptTokenizer`.
    """
    config = for_device(config, info)
    info = as_served(info, config)
    return BatchEngine(
        config,
        info=info,
        scheduler=make_scheduler(config, now_s=trio.current_time()),
        worker=worker,
        codec=codec,
        tokenize=PromptTokenizer(codec, info.max_model_len, run=run),
    )


@dataclass(frozen=True, slots=True)
class SchedulerKind:
    """What a scheduler's name stands for.

    Attributes:
        scheduler: makes one; the time is in seconds on the engine's clock.
        model: makes what runs its plans; called on the model's thread, and imports torch only there.
        most_tokens: of one request, prompt and output together, that its cache holds; infinity for no such bound.
        block_tokens: tokens in a block of the KV cache on this model's device; the configuration's, or more.
    """

    scheduler: Callable[[EngineConfig, float], Scheduler]
    model: Callable[["LoadedModel", EngineConfig], Model]
    most_tokens: Callable[[EngineConfig], float]
    block_tokens: Callable[[EngineConfig, ModelInfo], int]


def _dynamic(config: EngineConfig, now_s: float) -> Scheduler:
    settings = DynamicSettings(
        max_batch_size=config.max_batch_size,
        max_wait_s=config.max_wait_ms / 1000,
        anchor=config.wait_anchor,
        debounce_s=config.debounce_ms / 1000,
        buckets=config.length_buckets,
        adaptive=config.adaptive_wait,
        early_compaction=config.early_compaction,
        max_step_s=config.step_stall_s * _STEP_SHARE,
    )
    return DynamicScheduler(settings, now_s=now_s)


def _padded(loaded: "LoadedModel", config: EngineConfig) -> Model:
    from wsbatch.model.padded import PaddedModel

    return PaddedModel(loaded)


def _continuous(config: EngineConfig, now_s: float) -> Scheduler:
    return ContinuousScheduler(
        max_batch_size=config.max_batch_size,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        itl_slo_s=None if config.itl_slo_ms is None else config.itl_slo_ms / 1000,
        pool=BlockPool(_total_blocks(config), config.block_tokens, prefix_cache=config.prefix_cache),
        max_step_s=config.step_stall_s * _STEP_SHARE,
    )


def _paged(loaded: "LoadedModel", config: EngineConfig) -> Model:
    from wsbatch.model.paged import PagedModel

    return PagedModel(
        loaded,
        total_blocks=_total_blocks(config),
        block_tokens=config.block_tokens,
        kernel_level=config.kernel_level,
    )


def _readable_block(config: EngineConfig, info: ModelInfo) -> int:
    """Of a size that fast attention on the model's device can read."""
    if info.device != "cuda" or info.dtype == "float32":
        return config.block_tokens
    return -(-config.block_tokens // _CUDA_BLOCK_TOKENS) * _CUDA_BLOCK_TOKENS


def _total_blocks(config: EngineConfig) -> int:
    return config.max_batch_total_tokens // config.block_tokens


SCHEDULERS: dict[str, SchedulerKind] = {
    "dynamic": SchedulerKind(
        _dynamic, _padded, most_tokens=lambda config: math.inf, block_tokens=lambda config, info: config.block_tokens
    ),
    "continuous": SchedulerKind(
        _continuous,
        _paged,
        most_tokens=lambda config: _total_blocks(config) * config.block_tokens,
        block_tokens=_readable_block,
    ),
}
"""By `EngineConfig.scheduler`."""


def for_device(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """The configuration with KV blocks that fit the model's device."""
    block_tokens = SCHEDULERS[config.scheduler].block_tokens(config, info)
    return config if block_tokens == config.block_tokens else replace(config, block_tokens=block_tokens)


def make_scheduler(config: EngineConfig, *, now_s: float) -> Scheduler:
    """The scheduler that a configuration asks for."""
    return SCHEDULERS[config.scheduler].scheduler(config, now_s)


def as_served(info: ModelInfo, config: EngineConfig) -> ModelInfo:
    """The model's facts with the `max_model_len` that this configuration serves: no more than its cache holds."""
    most_tokens = SCHEDULERS[config.scheduler].most_tokens(config)
    return info if most_tokens >= info.max_model_len else replace(info, max_model_len=int(most_tokens))


def _load(config: EngineConfig, progress: Progress | None) -> tuple[Model, TextCodec]:
    """The model and its text codec; runs on the model's thread, and imports torch only here."""
    name, _, costs = config.model.partition(":")
    if name == "simulated":
        from wsbatch.model.simulated import SimulatedModel

        simulated = SimulatedModel(
            _step_costs(costs), max_model_len=config.max_model_len or 8192, block_tokens=config.block_tokens
        )
        return simulated, ByteText()
    from wsbatch.model.loading import load
    from wsbatch.text import HuggingFaceText

    loaded = load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_model_len=config.max_model_len,
        fused=config.scheduler == "continuous",
        progress=progress,
    )
    codec = HuggingFaceText(loaded.directory)
    return SCHEDULERS[config.scheduler].model(loaded, for_device(config, loaded.info)), codec


def _step_costs(text: str) -> "CostModel":
    """The costs in `simulated:tau_ms=10,alpha_ms=1,beta_ms=0.5`: of a step, a decode row, a prompt token."""
    from wsbatch.model.simulated import DEFAULT_COSTS

    costs: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = -1.0
        if name not in ("tau_ms", "alpha_ms", "beta_ms") or not 0 <= milliseconds < math.inf:
            raise ValueError(
                f"EngineConfig.model is 'simulated:{text}': {part!r} must be tau_ms, alpha_ms or beta_ms, `=`, and "
                "milliseconds from 0 on"
            )
        costs[name.removesuffix("_ms") + "_s"] = milliseconds / 1000
    return replace(DEFAULT_COSTS, **costs)
