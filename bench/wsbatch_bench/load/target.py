"""What load is put on: a server of this project over WebSockets."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

import trio

from wsbatch.client import Client
from wsbatch.errors import ConnectionLost, RequestError, WsbatchError
from wsbatch.messages import Finished, GenerateRequest, Tokens
from wsbatch.nurseries import background_tasks
from wsbatch_bench.load.http_client import Dial, get
from wsbatch_bench.load.record import Record
from wsbatch_bench.load.server import ServerTotals, parse_totals

Connect = Callable[[], AbstractAsyncContextManager[Client]]


class Target(Protocol):
    """Anything that answers a request of given lengths with a stream of tokens."""

    @property
    def backend(self) -> str:
        """Its kind, for the report."""
        ...

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        """Send now; wait for the end; write down what came, in seconds since `start_s` on trio's clock.

        Failures are written down, not raised. Exactly `record.output_tokens` tokens are asked for. Cancelled,
        it leaves the request.
        """
        ...

    async def totals(self) -> ServerTotals | None:
        """The server's own accounting; None where it has none."""
        ...


class WebSocketTarget:
    """A wsbatch server. Each live request has a connection of its own, as if each came from another user.

    (Requests of one connection share one writer, and the server's fair queue sets them apart from others.)
    """

    backend = "wsbatch"

    def __init__(self, connect: Connect, *, dial: Dial, host: str, nursery: trio.Nursery) -> None:
        self._connect = connect
        self._dial = dial
        self._host = host
        self._nursery = nursery
        self._free: list[Client] = []
        self.connections = 0
        self.opened = 0  # of them ahead of the load
        self.model = ""

    async def add_connections(self, count: int) -> None:
        """Open connections ahead of the load, or as many as the server takes. Raises what the first one raises."""
        for _ in range(count):
            try:
                self._free.append(await self._open())
                self.opened += 1
            except RequestError:  # it has no room for more
                if not self._free:
                    raise
                return

    def _take(self) -> Client | None:
        """A free connection that is still open."""
        while self._free:
            client = self._free.pop()
            if not client.lost:
                return client
        return None

    async def _open(self) -> Client:
        client: Client = await self._nursery.start(self._hold)
        self.model = client.hello.model
        self.connections += 1
        return client

    async def _hold(self, task_status: trio.TaskStatus[Client]) -> None:
        async with self._connect() as client:
            task_status.started(client)
            await trio.sleep_forever()

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        """See `Target.send`."""
        record.sent_s = trio.current_time() - start_s
        sampling = replace(record.sampling, max_tokens=record.output_tokens, ignore_eos=True)
        client, lost = None, False
        try:
            client = self._take() or await self._open()
            request = GenerateRequest(token_ids=prompt_ids, sampling=sampling, priority=record.priority)
            async with client.generate(request) as stream:
                async for event in stream:
                    now_s = trio.current_time() - start_s
                    if isinstance(event, Tokens):
                        record.arrivals.append((now_s, len(event.token_ids)))
                    elif isinstance(event, Finished):
                        record.timing, record.batch = event.timing, event.batch
                        record.reported_tokens = event.usage.completion_tokens
                        record.cached_tokens = event.usage.cached_tokens
                        record.ended_s = now_s
                        if event.finish_reason != "length":
                            record.error = event.finish_reason
        except (WsbatchError, OSError) as error:
            code = getattr(error, "code", type(error).__name__)
            unreached = client is None and isinstance(error, ConnectionLost | OSError)
            record.failed(code, trio.current_time() - start_s, str(error), unreached=unreached)
            lost = isinstance(error, ConnectionLost)
        finally:
            if client is not None and not lost:  # also where the caller has given up: that is a `cancel`, no more
                self._free.append(client)

    async def totals(self) -> ServerTotals:
        """See `Target.totals`."""
        return parse_totals((await get(self._dial, self._host, "/metrics")).decode())


@asynccontextmanager
async def open_websocket_target(
    connect: Connect, *, dial: Dial, host: str, connections: int
) -> AsyncIterator[WebSocketTarget]:
    """Connect `connections` times; more follow on demand. `dial` and `host` are for the plain HTTP of the same port."""
    async with background_tasks() as nursery:
        target = WebSocketTarget(connect, dial=dial, host=host, nursery=nursery)
        await target.add_connections(connections)
        yield target
