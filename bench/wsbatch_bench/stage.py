"""Where a setting is measured: the whole server in virtual time, or a server process with a real model."""

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from wsbatch.client import connect
from wsbatch.processes import module_command
from wsbatch_bench.costs import Costs
from wsbatch_bench.http_client import dial_url
from wsbatch_bench.load import LoadPlan, LoadRun, run_load
from wsbatch_bench.setting import Setting
from wsbatch_bench.target import WebSocketTarget, open_websocket_target
from wsbatch_bench.virtual import open_virtual_target, run_virtual

_START_S = 300.0
_STOP_S = 15.0


class Stage(Protocol):
    """Runs a plan against a setting."""

    @property
    def name(self) -> str:
        """`virtual` or `real`."""
        ...

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """Start a server of this setting, put the load on it, end it. Blocks until then."""
        ...


@dataclass(frozen=True)
class VirtualStage:
    """Client, wire, server and scheduler as they are; a model that sleeps for a step's cost, on a clock that jumps."""

    costs: Costs
    name = "virtual"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Equal runs give equal results."""

        async def main() -> LoadRun:
            config = setting.config(model="simulated")
            async with open_virtual_target(config, self.costs[setting.scheduler]) as (target, _):
                return await run_load(target, plan)

        return run_virtual(main)


@dataclass(frozen=True)
class RealStage:
    """`wsbatch serve` in a process of its own, on this machine; a fresh one for each run.

    Attributes:
        model: as `wsbatch serve --model` takes it.
        flags: further flags of `wsbatch serve`.
    """

    model: str
    flags: tuple[str, ...] = ()
    name = "real"

    def run(self, setting: Setting, plan: LoadPlan) -> LoadRun:
        """See `Stage.run`. Raises RuntimeError where the server does not start."""

        async def main() -> LoadRun:
            async with open_server_process(self.model, [*setting.measuring_flags(), *self.flags]) as target:
                return await run_load(target, plan)

        return trio.run(main)


@asynccontextmanager
async def open_server_process(model: str, flags: list[str]) -> AsyncIterator[WebSocketTarget]:
    """Start `wsbatch serve` on a free port and connect to it; ended when the block is left."""
    command = module_command("wsbatch", "serve", "--model", model, "--port", "0", "--log-level", "warning", *flags)
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(trio.run_process, command, stdout=subprocess.PIPE, check=False, deliver_cancel=_terminate)
        )
        url = await _listening(process)
        dial, host, _ = dial_url(url)
        async with open_websocket_target(partial(connect, url), dial=dial, host=host, connections=16) as target:
            yield target
        nursery.cancel_scope.cancel()


async def _listening(process: trio.Process) -> str:
    """The URL that the server prints once it listens."""
    assert process.stdout is not None
    text = b""
    with trio.fail_after(_START_S):
        while not text.endswith(b"\n"):
            chunk = await process.stdout.receive_some()
            if not chunk:
                raise RuntimeError(f"the server did not start: exit status {await process.wait()}")
            text += chunk
    return text.decode().split()[-1]


async def _terminate(process: trio.Process) -> None:
    process.terminate()
    with trio.move_on_after(_STOP_S):
        await process.wait()
        return
    process.kill()


def serve_command(model: str, setting: Setting, flags: Sequence[str] = ()) -> str:
    """What to type for a server of this setting; `flags` are those that it was measured with."""
    return " ".join(["wsbatch serve", "--model", model, *setting.flags(), *flags])
