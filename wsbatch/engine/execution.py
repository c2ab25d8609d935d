"""Running steps on the worker: watched, failing rows told apart, and the model probed when it is in doubt itself."""

import trio

from wsbatch.engine.core import EngineCore
from wsbatch.engine.health import PROBES
from wsbatch.engine.isolation import run_step
from wsbatch.engine.watchdog import Watchdog
from wsbatch.engine.worker import Worker
from wsbatch.errors import EngineDead, StepFailed
from wsbatch.steps import StepPlan, StepResult

_PROBE_PAUSE_S = 1.0


class Execution:
    """The engine's one way to its worker. `watchdog.run` must be a task.

    Attributes:
        watchdog: ends a step that makes no progress.
    """

    def __init__(self, worker: Worker, *, stall_s: float) -> None:
        self.watchdog = Watchdog(stall_s)
        self._worker = worker
        self._stall_s = stall_s

    async def step(self, plan: StepPlan) -> tuple[StepResult, dict[int, StepFailed]]:
        """As `run_step`. Raises StepFailed where the whole step is lost, EngineDead where the engine is."""
        try:
            with self.watchdog.watching():
                return await run_step(self._worker, plan)
        except trio.TooSlowError:
            raise EngineDead(f"a model step made no progress for {self._stall_s} s") from None

    async def probe(self, core: EngineCore) -> None:
        """Find out whether the model is broken or only the last requests were. Call it between two steps.

        The probe has three tries, a second apart, because what ails the model may pass. Raises EngineDead when all
        fail.
        """
        health = core.health
        for attempt in range(PROBES):
            if attempt:
                health.doubtful = True
                await trio.sleep(_PROBE_PAUSE_S)
            plan = core.scheduler.probe(health.probe_ids(attempt))
            if plan is None:
                break  # what runs tells as well
            try:
                _, failed = await self.step(plan)
                failures = [*failed.values()]
            except StepFailed as error:
                failures = [error]
            health.record(failures, tokens=not failures, now_s=trio.current_time())
            if not failures:
                break
        else:
            raise EngineDead(f"the model is broken: it failed {health.in_a_row} times in a row, probes included")
        health.doubtful = False
