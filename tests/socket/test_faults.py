"""Faults of the model in a real server process: who is told what, and how the process ends."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from wsbatch.client import connect
from wsbatch.errors import EngineDead, ModelError

EXIT_ENGINE_DIED = 70
CONTINUOUS = ("--scheduler", "continuous", "--step-stall-s", "0.5")


async def ends_of_live_streams(url: str, live: int) -> list[BaseException | None]:
    """Start streams, then one that has the fault when all of them run; how each ended, the last one's first."""
    ends: list[BaseException | None] = []
    running = 0
    all_run = trio.Event()

    async def stream(prompt: str, max_tokens: int) -> None:
        nonlocal running
        try:
            async with client.generate(prompt, max_tokens=max_tokens) as events:
                await anext(events)
                await anext(events)
                running += 1
                if running == live:
                    all_run.set()
                async for _ in events:
                    pass
            ends.append(None)
        except (EngineDead, ModelError) as error:
            ends.append(error)

    async with connect(url) as client, trio.open_nursery() as nursery:
        for _ in range(live):
            nursery.start_soon(stream, "live", 200)
        await all_run.wait()
        nursery.start_soon(stream, "fault\x01", 5)
    return ends


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise SystemExit(0)", "the model's thread died: SystemExit: 0"),
        ("raise KeyboardInterrupt", "the model's thread died: KeyboardInterrupt"),
        ("time.sleep(86400)", "no progress"),
    ],
)
async def test_a_lost_model_is_told_to_everybody_and_ends_the_process(
    fault: str, words: str, serve_process: Callable[..., Any]
) -> None:
    server = serve_process(*CONTINUOUS, fault=fault)
    assert server.probe() == 200
    ends = await ends_of_live_streams(server.url, 8)
    assert [type(end) for end in ends] == [EngineDead] * 9
    assert server.probe() in (0, 503)
    status, err = server.end()
    assert status == EXIT_ENGINE_DIED
    assert words in err
    assert "Traceback" not in err


async def test_a_request_that_breaks_its_step_ends_alone(serve_process: Callable[..., Any]) -> None:
    server = serve_process(*CONTINUOUS, fault="raise MemoryError")
    ends = await ends_of_live_streams(server.url, 8)
    assert [type(end) for end in ends] == [ModelError] + [type(None)] * 8
    assert server.probe() == 200
    server.terminate()
    assert server.end()[0] == 0
