"""Whether this process was suspended (SIGSTOP, a machine asleep) while it measured: then it measured something else."""

import time

import trio

_BEAT_S = 0.5
_LATE_S = 1.0  # beyond the CPU time of a busy event loop: ten thousand connections take more than a second to close


class Suspension:
    """How long this process did not run; `watch` must be a task.

    Servers are suspended with it, as a rule, and their timeouts run out meanwhile: a frame that was being written is
    over `send_timeout_s` when they go on, and the connection is reset.

    Attributes:
        seconds: all in all.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __str__(self) -> str:
        return f"this process was suspended for {self.seconds:.0f} s meanwhile" if self.seconds else ""

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            due_s = trio.current_time() + _BEAT_S
            began_cpu_s = time.process_time()
            await trio.sleep_until(due_s)
            late_s = trio.current_time() - due_s
            if late_s - (time.process_time() - began_cpu_s) > _LATE_S:
                self.seconds += late_s
