"""Our transport with a session that sends back every message: what a WebSocket conformance suite is pointed at.

`python bench/lab/echo_server.py [PORT]`; see autobahn.sh beside it.
"""

import sys
from contextlib import suppress
from functools import partial

import trio

from wsbatch.config import ServerConfig
from wsbatch.server.client_deadlines import ClientDeadlines
from wsbatch.server.connection import Connection, Disconnected
from wsbatch.server.http import Answer, Head
from wsbatch.server.memory import FreedMemory
from wsbatch.server.metrics import ServerMetrics
from wsbatch.server.transport import Transport


async def echo(connection: Connection) -> None:
    """Send back what comes, in kind, until the client is gone."""
    with suppress(Disconnected):
        while True:
            await connection.send((await connection.receive()).data)


def nothing_here(head: Head) -> Answer:
    """Answer plain HTTP."""
    return Answer(404, b"only WebSockets here\n")


async def main(port: int) -> None:
    """Serve until killed; says `listening` once it does."""
    transport = Transport(
        ServerConfig(port=port),
        session=echo,
        plain=nothing_here,
        probe=nothing_here,
        refusal=lambda: None,
        metrics=ServerMetrics(),
        memory=FreedMemory(),
        deadlines=ClientDeadlines(),
    )
    async with trio.open_nursery() as nursery:
        serving = partial(trio.serve_tcp, transport.handle, port, host="127.0.0.1")
        (listener,) = await nursery.start(serving)
        print(f"listening on ws://127.0.0.1:{listener.socket.getsockname()[1]}", flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 0)
