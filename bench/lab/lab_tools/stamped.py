"""A server whose tokens are times: what a token's way to its client costs can be read off it.

Run as a script with `--interval-ms 10` it serves: every live stream gets a token each interval, whose id is the
machine's monotonic clock in microseconds. No model, and no batching: nothing here takes time but sending.
"""

import argparse
import sys
import time

import trio

from wsbatch.config import ServerConfig
from wsbatch.engine.stream import Stream
from wsbatch.server.serve import serve
from wsbatch.steps import ModelInfo
from wsbatch.testing import ScriptedEngine

_WRAP = 2**31  # token ids are below it: half an hour of microseconds


def stamp() -> int:
    """Now, as a token id. The clock is the whole machine's, so another process can compare."""
    return time.monotonic_ns() // 1000 % _WRAP


def age_ms(token_id: int) -> float:
    """How long ago this token was made, in milliseconds."""
    return (stamp() - token_id) % _WRAP / 1000


class StampedEngine(ScriptedEngine):
    """Run `play` beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.info = ModelInfo("stamped", "stamped-1", "none", "cpu", 1_000_000, _WRAP, frozenset())

    def push(self, stream: Stream, text: str = "a") -> None:
        """One token for this stream."""
        self._produced[stream] += 1
        stream.push([stamp()], text, [])


def stamped_command(interval_ms: float) -> list[str]:
    """The command line that serves it."""
    return [sys.executable, "-P", __file__, "--interval-ms", str(interval_ms)]


async def run(interval_s: float) -> None:
    """Serve on a free port, which is printed, until cancelled."""
    engine = StampedEngine()
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve, engine, ServerConfig(port=0, max_live_requests=100_000))
        print(server.url, flush=True)
        await engine.play(interval_s=interval_s)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval-ms", type=float, required=True)
    trio.run(run, parser.parse_args().interval_ms / 1000)


if __name__ == "__main__":
    main()
