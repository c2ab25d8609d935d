"""Run a function in a process of its own, keep what it reports, and end it when its time is up."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Row = dict[str, Any]
_EXIT_S = 5.0


@dataclass(slots=True)
class Outcome:
    """What became of a stage: ok, skipped, failed or timed out; the rows it reported until then, and why it ended."""

    status: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    reason: str = ""


def supervise(
    work: Callable[[Any, Callable[[Row], None]], None],
    job: Any,
    *,
    limit_s: float,
    start_method: str,
    skipped: type[Exception],
    on_row: Callable[[Row], None] = lambda row: None,
) -> Outcome:
    """Call `work(job, report)` in a new process for at most `limit_s` seconds.

    Args:
        start_method: of `multiprocessing`; spawn where this process may have touched the device.
        skipped: an exception of this type means that the work does not apply here.
        on_row: called here with each row, as it comes.
    """
    context: Any = multiprocessing.get_context(start_method)  # its annotations lack Process
    ours, theirs = context.Pipe(duplex=False)
    begin_s = time.monotonic()
    process = context.Process(target=_work, args=(work, job, theirs, skipped))
    process.start()
    theirs.close()
    outcome = Outcome("timed out", reason=f"not done within {limit_s:.0f} s")
    try:
        while ours.poll(max(0.0, begin_s + limit_s - time.monotonic())):
            kind, content = ours.recv()
            if kind == "row":
                outcome.rows.append(content)
                on_row(content)
            else:
                outcome.status, outcome.reason = kind, content
                break
    except EOFError:
        process.join(_EXIT_S)
        outcome.status, outcome.reason = "failed", f"its process ended with exit code {process.exitcode}"
    finally:
        if outcome.status == "timed out" or process.join(_EXIT_S) or process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it and all that it has started
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
        process.join()
        ours.close()
    outcome.seconds = time.monotonic() - begin_s
    return outcome


def _work(work: Callable[..., None], job: Any, connection: Connection, skipped: type[Exception]) -> None:
    os.setsid()
    try:
        work(job, lambda row: connection.send(("row", row)))
        message = ("ok", "")
    except skipped as error:
        message = ("skipped", str(error))
    except BaseException as error:  # noqa: BLE001 - reported, whatever it is
        message = ("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}")
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)
        connection.close()
    os._exit(0)  # a device in a bad state may hang the interpreter's own clean-up
