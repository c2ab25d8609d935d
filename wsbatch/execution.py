"""Running steps on the worker: watched, failing rows told apart, and the model probed when it is in doubt itself."""

import trio

from wsbatch.batching.scheduler import Scheduler
from wsbatch.errors import EngineDead, StepFailed
from wsbatch.failures import Failures
from wsbatch.isolation import run_step
from wsbatch.steps import StepPlan, StepResult
from wsbatch.watchdog import Watchdog
from wsbatch.worker import Worker

_PROBES = 3
_PROBE_PAUSE_S = 1.0
_PROBE_TOKENS = 16


class Execution:
    """The engine's one way to its worker. `watchdog.run` must be a task.

    Attributes:
        watchdog: ends a step that makes no progress.
        failures: of the steps so far.
        began_s: when the step in flight began; None between two.
        doubtful: whether a probe of the model has failed: nothing is to be let in until the next one.
    """

    def __init__(self, worker: Worker, *, stall_s: float, vocab_size: int) -> None:
        self.watchdog = Watchdog(stall_s)
        self.failures = Failures()
        self.began_s: float | None = None
        self.doubtful = False
        self._worker = worker
        self._stall_s = stall_s
        self._vocab_size = vocab_size
        self._proven: tuple[int, ...] = ()  # the beginning of a prompt that gave a token

    def __repr__(self) -> str:
        return f"<Execution {'idle' if self.began_s is None else 'in a step'}, {self.failures!r}>"

    async def step(self, plan: StepPlan) -> tuple[StepResult, dict[int, StepFailed]]:
        """As `run_step`. Raises StepFailed where the whole step is lost, EngineDead where the engine is."""
        self.began_s = trio.current_time()
        try:
            with self.watchdog.watching():
                return await run_step(self._worker, plan)
        except trio.TooSlowError:
            raise EngineDead(f"a model step made no progress for {self._stall_s} s") from None
        finally:
            self.began_s = None

    def succeeded(self, prompt_ids: tuple[int, ...]) -> None:
        """A step gave a token to the request with this prompt."""
        self._proven = self._proven or prompt_ids[:_PROBE_TOKENS]

    async def probe(self, scheduler: Scheduler) -> None:
        """Find out whether the model is broken or only the last requests were. Call it between two steps.

        The probe is the beginning of a prompt that gave a token, where there ever was one: no client can make that
        fail. It has three tries, a second apart, because what ails the model may pass. Raises EngineDead when all fail.
        """
        for attempt in range(_PROBES):
            if attempt:
                self.doubtful = True
                await trio.sleep(_PROBE_PAUSE_S)
            plan = scheduler.probe(self._proven or (attempt * self._vocab_size // _PROBES,))
            if plan is None:
                break  # what runs tells as well
            try:
                await self.step(plan)
            except StepFailed as error:
                self.failures.record([error], tokens=0, now_s=trio.current_time())
            else:
                self.failures.record([], tokens=1, now_s=trio.current_time())
                break
        else:
            raise EngineDead(f"the model is broken: it failed {self.failures.in_a_row} times in a row, probes included")
        self.doubtful = False
