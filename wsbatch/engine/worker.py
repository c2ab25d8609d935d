"""The one model thread: it loads the model, runs every step, and only plain data crosses to it and back."""

import queue
from collections.abc import Callable
from typing import Protocol

import outcome
import trio

from wsbatch.errors import EngineDead, StepFailed
from wsbatch.steps import Model, ModelInfo, StepPlan, StepResult


class Worker(Protocol):
    """Where steps run: a thread, or virtual time in tests."""

    async def step(self, plan: StepPlan) -> StepResult:
        """Run one step; one at a time. Raises StepFailed where the model raised, EngineDead where it is lost with it.

        Cancelling it leaves the step running to its end; its result is dropped.
        """
        ...


class _Job:
    """A plan on its way through the thread. `done` is set on the event loop."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.done = trio.Event()
        self.outcome: outcome.Outcome[StepResult] | None = None

    def finish(self, result: outcome.Outcome[StepResult]) -> None:
        self.outcome = result
        self.done.set()


class ThreadWorker:
    """Runs a model on one thread of its own from load to end.

    One long-lived thread rather than a call per step: thread pools of the math libraries, CUDA streams and
    inference_mode belong to a thread, and trio's thread cache promises no particular one; it also costs half as much.
    The thread cannot be killed: a step that hangs keeps `run`, and so `trio.run`, from ever ending.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(
        self, build: Callable[[], Model], *, task_status: trio.TaskStatus[ModelInfo] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Build the model on the thread, report its facts, and serve steps until `close`.

        Raises whatever `build` raises. Cancelling it has no effect until `close` is called and the step is done.
        """
        token = trio.lowlevel.current_trio_token()
        await trio.to_thread.run_sync(self._serve, build, token, task_status.started, limiter=trio.CapacityLimiter(1))

    def close(self) -> None:
        """Let the thread end after the step that it is running."""
        self._jobs.put(None)

    async def step(self, plan: StepPlan) -> StepResult:
        """See `Worker.step`."""
        job = _Job(plan)
        self._jobs.put(job)
        await job.done.wait()
        assert job.outcome is not None
        try:
            return job.outcome.unwrap()
        except Exception as error:
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        except BaseException as error:  # such as SystemExit: no failed step, but a thread told to end
            raise EngineDead(f"the model's thread died: {type(error).__name__}: {error}") from error

    def _serve(
        self, build: Callable[[], Model], token: trio.lowlevel.TrioToken, ready: Callable[[ModelInfo], None]
    ) -> None:
        model = build()
        token.run_sync_soon(ready, model.info)
        while (job := self._jobs.get()) is not None:
            token.run_sync_soon(job.finish, outcome.capture(model.run, job.plan))
