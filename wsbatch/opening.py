"""`open_engine`: from a configuration to a running engine, and down again."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from wsbatch.batch_engine import BatchEngine
from wsbatch.batching.dynamic import DynamicScheduler, DynamicSettings
from wsbatch.batching.scheduler import Scheduler
from wsbatch.config import EngineConfig
from wsbatch.steps import Model, ModelInfo
from wsbatch.text import ByteText, TextCodec
from wsbatch.tokenising import Tokenising
from wsbatch.worker import ThreadWorker

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

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            info: ModelInfo = await nursery.start(worker.run, build)
            codec = codecs[0]
            engine = BatchEngine(
                config,
                info=info,
                scheduler=make_scheduler(config, now_s=trio.current_time()),
                worker=worker,
                codec=codec,
                tokenise=Tokenising(codec, info.max_model_len),
                max_request_tokens=info.max_model_len,
            )
            nursery.start_soon(engine.run)
            yield engine
            if engine.state == "dead":
                failure = await engine.wait_dead()
        except Exception as error:  # noqa: BLE001 - raised again below, outside the nursery, as it is
            failure = error
        finally:
            nursery.cancel_scope.cancel()
            worker.close()
    if failure is not None:
        raise failure


def make_scheduler(config: EngineConfig, *, now_s: float) -> Scheduler:
    """The scheduler that a configuration asks for."""
    return DynamicScheduler(
        DynamicSettings(
            max_batch_size=config.max_batch_size,
            max_wait_s=config.max_wait_ms / 1000,
            anchor=config.wait_anchor,
            debounce_s=config.debounce_ms / 1000,
            buckets=config.length_buckets,
            adaptive=config.adaptive_wait,
            early_compaction=config.early_compaction,
        ),
        now_s=now_s,
    )


def _load(config: EngineConfig, progress: Progress | None) -> tuple[Model, TextCodec]:
    """The model and its text codec; runs on the model's thread, and imports torch only here."""
    if config.model == "simulated":
        from wsbatch.model.simulated import SimulatedModel, StepCosts

        return SimulatedModel(StepCosts(), max_model_len=config.max_model_len or 8192), ByteText()
    from wsbatch.model.loading import load
    from wsbatch.model.padded import PaddedModel
    from wsbatch.text import HuggingFaceText

    loaded = load(
        config.model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads,
        max_model_len=config.max_model_len,
        progress=progress,
    )
    return PaddedModel(loaded), HuggingFaceText(loaded.directory)
