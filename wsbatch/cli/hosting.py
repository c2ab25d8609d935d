"""A server in this process from load to exit: its signals, its exit statuses, the way out of a model that hangs."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import trio

from wsbatch.cli.descriptors import allow_connections
from wsbatch.cli.parsing import BAD_USAGE, CommandError
from wsbatch.cli.progress import LoadProgress, load_progress
from wsbatch.cli.settings import in_flags
from wsbatch.cli.streams import OutputLost
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.errors import EngineDead, WsbatchError
from wsbatch.nurseries import background_tasks

if TYPE_CHECKING:
    from wsbatch.engine.interface import Engine
    from wsbatch.server.serve import Server

LOG = logging.getLogger("wsbatch.cli")

STOPPED, FORCED, CANNOT_START, ENGINE_DIED = 0, 1, BAD_USAGE, 70

EXIT_STATUSES = f"""\
exit statuses:
  {STOPPED}    stopped by SIGTERM or SIGINT: live requests finished, or were told `shutdown`, within --drain-s
  {FORCED}    ended at once by a second signal, or by an unexpected error (with a traceback)
  {CANNOT_START}    could not start: a bad flag, a model that cannot be loaded, an address that cannot be listened on
  {ENGINE_DIED}   the model died, or a step of it did not end: clients were told `engine_dead`; start it again
  130, 143  interrupted or terminated while the model was still loading
"""

# Two threads share the GIL here: the event loop, and the model's, which needs it between any two tensor operations.
# The one that wants it waits for up to this interval while the other runs Python. At the default of 5 ms, one burst of
# frames on the loop can cost a decode step of a few dozen operations many times its own length, and a token that is
# ready can wait 5 ms for the loop. A switch costs microseconds: at half a millisecond, no more CPU time a token was
# measured than at 5 ms (32 clients, SmolLM2-135M).
_SWITCH_INTERVAL_S = 0.0005

# Once every client has been told: how long the step in flight may still take, before the process leaves without it.
# After a signal no longer than its grace, of which this much is kept for it.
_LAST_STEP_S = 5.0
_LEAVING_S = 1.0

WhileServing: TypeAlias = Callable[["Server"], Awaitable[None]]
Opening: TypeAlias = Callable[[], AbstractAsyncContextManager["Engine"]]


def say_where(server: "Server") -> None:
    """Say on stdout where the server listens. A stdout that takes nothing is no reason not to serve."""
    try:
        print(f"listening on {server.url}", flush=True)
    except OutputLost as error:
        LOG.warning("%s: it listens on %s", error, server.url)
    for url in server.urls[1:]:
        LOG.info("listening on %s, too", url)


async def announce(server: "Server") -> None:
    """Say where the server listens, and stay."""
    say_where(server)
    await trio.sleep_forever()


def host(engine_config: EngineConfig, server_config: ServerConfig, *, while_serving: WhileServing) -> int:
    """Load the model and serve it until a signal comes; the exit status.

    `while_serving` is run once the server listens; when it returns, the server stops as it does for a signal.
    """
    with load_progress() as progress:

        def opening() -> AbstractAsyncContextManager["Engine"]:
            from wsbatch.engine.open import open_engine

            LOG.info("loading model %s", engine_config.model)
            return open_engine(engine_config, progress=progress)

        return host_engine(opening, server_config, while_serving=while_serving, progress=progress)


def host_engine(
    opening: Opening,
    server_config: ServerConfig,
    *,
    while_serving: WhileServing,
    progress: LoadProgress | None = None,
) -> int:
    """Serve the engine that `opening` opens, until a signal comes; the exit status. `progress` is of its loading.

    Raises CommandError where it cannot start.
    """
    allow_connections(server_config.max_connections)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        # Here, because the base install has none of it.
        import wsbatch.server.serve  # noqa: F401
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed: a server needs `pip install 'wsbatch[server]'`"
        raise CommandError(why, CANNOT_START) from error
    return trio.run(_Hosting(opening, server_config, while_serving=while_serving, progress=progress).run)


class _CannotStart(CommandError):
    def __init__(self, why: object) -> None:
        super().__init__(in_flags(why), CANNOT_START)


class _Hosting:
    def __init__(
        self,
        opening: Opening,
        server_config: ServerConfig,
        *,
        while_serving: WhileServing,
        progress: LoadProgress | None,
    ) -> None:
        self._opening = opening
        self._server_config = server_config
        self._while_serving = while_serving
        self._progress = progress
        self._asked_to_stop = trio.Event()
        self._server: Server | None = None  # None until it listens
        self._leave_by_s = inf

    async def run(self) -> int:
        """The whole life; returns the exit status, or leaves the process where the model's thread would hold it."""
        with self._signals():
            try:
                async with self._opening() as engine:
                    self._close_progress()
                    LOG.info("model loaded: %s", _facts(engine))
                    # What loading made is here to stay, 400,000 objects of it with torch. A full collection looks at
                    # them all, with the GIL: 200 ms for the event loop and the model. Frozen, it costs next to nothing.
                    gc.collect()
                    gc.freeze()
                    await self._serve(engine)
                    # Leaving open_engine waits for the step in flight, which may never end.
                    trio.lowlevel.spawn_system_task(_leave_after_last_step, self._leave_by_s)
            except EngineDead:
                return ENGINE_DIED
            except Exception as error:
                if self._server is not None:
                    raise
                # Whatever a model's files make the libraries raise is one line; --log-level debug says where from.
                LOG.debug("cannot start", exc_info=True)
                raise _CannotStart(_in_words(error)) from error
        LOG.info("stopped")
        return STOPPED

    async def _serve(self, engine: "Engine") -> None:
        """From listening to the end of the last connection."""
        async with background_tasks() as nursery:
            try:
                self._server = await nursery.start(self._serve_to_end, engine, nursery.cancel_scope)
            except OSError as error:
                where = error.filename or f"{self._server_config.host}:{self._server_config.port}"
                raise _CannotStart(f"cannot listen on {where}: {error.strerror or error}") from error
            except ValueError as error:
                raise _CannotStart(error) from error
            for host, port in self._server.probe_addresses:
                LOG.info("probes and /metrics alone on %s, port %d", host, port)
            nursery.start_soon(self._drain_when_asked, self._server)
            nursery.start_soon(self._run_while_serving, self._server)
            await trio.sleep_forever()  # `_serve_to_end` ends it

    async def _serve_to_end(
        self, engine: "Engine", rest: trio.CancelScope, *, task_status: trio.TaskStatus["Server"]
    ) -> None:
        from wsbatch.server.serve import serve

        try:
            await serve(engine, self._server_config, task_status=task_status)
        except EngineDead as death:  # open_engine raises it too
            LOG.error("the engine died: %s", death)  # noqa: TRY400 - where it was raised says nothing
        rest.cancel()

    async def _drain_when_asked(self, server: "Server") -> None:
        await self._asked_to_stop.wait()
        LOG.info("draining: this takes %g s at most; another signal ends it at once", self._server_config.drain_s)
        await self._drain(server)

    async def _run_while_serving(self, server: "Server") -> None:
        await self._while_serving(server)
        await self._drain(server)

    async def _drain(self, server: "Server") -> None:
        drain_s = self._server_config.drain_s
        self._leave_by_s = min(self._leave_by_s, trio.current_time() + drain_s)
        await server.drain(drain_s - min(_LEAVING_S, drain_s / 4))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal asks the server to stop. The second ends the process, from the handler itself: nothing that
        hangs, be it the event loop, is in its way."""
        token = trio.lowlevel.current_trio_token()
        signalled = False

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal signalled
            if signalled:
                with suppress(OSError):
                    os.write(2, b"a second signal: ending at once\n")
                os._exit(FORCED)
            signalled = True
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(self._stop, number)

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _stop(self, number: int) -> None:
        if self._server is None:  # nobody is served yet, and a thread that is loading cannot be stopped
            self._close_progress()
            _leave(128 + number)
        self._asked_to_stop.set()

    def _close_progress(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _in_words(error: Exception) -> str:
    """What an expected error says of itself; of another one its name as well: `'model_type'` alone says nothing."""
    if isinstance(error, OSError | ValueError | ModuleNotFoundError | WsbatchError | _CannotStart):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _facts(engine: "Engine") -> str:
    info = engine.info
    return f"{info.name} in {info.dtype} on {info.device}, {info.max_model_len} tokens of context"


async def _leave_after_last_step(by_s: float) -> None:
    now_s = trio.current_time()
    await trio.sleep_until(min(now_s + _LAST_STEP_S, max(by_s, now_s + _LEAVING_S / 2)))
    LOG.error("a model step has not ended: leaving without it")
    _leave(ENGINE_DIED)


def _leave(status: int) -> NoReturn:
    """End the process now, its threads too; what was logged and printed is out first."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, OutputLost):
            stream.flush()
    os._exit(status)
