"""Steps in virtual time, and an engine over them: no thread, no torch, exact under trio's autojump clock."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.open import assemble
from wsbatch.errors import StepFailed
from wsbatch.model.simulated import DEFAULT_COSTS, SimulatedModel
from wsbatch.nurseries import background_tasks
from wsbatch.steps import PaddedStart, PagedStep, StepPlan, StepResult
from wsbatch.text import ByteText, TextCodec


class VirtualWorker:
    """Implements `Worker` by sleeping for a simulated model's step time.

    Attributes:
        plans: every plan it was given, with the time at which it began.
        fail: set it to choose plans that raise; it is asked once for each.
    """

    def __init__(self, model: SimulatedModel) -> None:
        self.model = model
        self.plans: list[tuple[float, StepPlan]] = []
        self.fail: Callable[[StepPlan], bool] = lambda plan: False

    @property
    def keys_seen(self) -> list[int]:
        """Keys of all rows that ever reached the model, in order, each as often as it was started or stepped."""
        starts = [plan for _, plan in self.plans if isinstance(plan, PaddedStart | PagedStep)]
        return [row.key for plan in starts for row in plan.rows]

    async def step(self, plan: StepPlan) -> StepResult:
        """Sleep for the step's time, then compute it."""
        self.plans.append((trio.current_time(), plan))
        await trio.sleep(self.model.step_s(plan))
        if self.fail(plan):
            raise StepFailed("told to fail")
        return self.model.compute(plan)


async def tokenize_here(function: Callable[[], list[int]], own: trio.CapacityLimiter) -> list[int]:
    """Stands in for a thread: autojump would count a real one as idle time and jump over it."""
    await trio.lowlevel.checkpoint()
    return function()


@asynccontextmanager
async def open_virtual_engine(
    config: EngineConfig, costs: CostModel = DEFAULT_COSTS, *, codec: TextCodec | None = None
) -> AsyncIterator[tuple[BatchEngine, VirtualWorker]]:
    """A running engine over a simulated model, and its worker to look into. Text is bytes unless `codec` says else."""
    model = SimulatedModel(costs, max_model_len=config.max_model_len or 8192, block_tokens=config.block_tokens)
    worker = VirtualWorker(model)
    engine = assemble(config, info=model.info, worker=worker, codec=codec or ByteText(), run=tokenize_here)
    async with background_tasks() as nursery:
        nursery.start_soon(engine.run)
        yield engine, worker
