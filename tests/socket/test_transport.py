"""The transport over real sockets, with a client that speaks raw bytes or trio_websocket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import trio_websocket

from wsbatch.config import ServerConfig
from wsbatch.messages import Accepted, Finished, GenerateRequest, Hello, SamplingParams, Tokens
from wsbatch.server import Server, serve
from wsbatch.testing.engines import ScriptedEngine
from wsbatch.wire import MSGPACK


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings: object) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve, engine, ServerConfig(port=0, **settings))
        nursery.start_soon(lambda: engine.play(interval_s=0))
        yield server
        nursery.cancel_scope.cancel()


async def test_a_prompt_streams_tokens_to_its_end() -> None:
    async with serving(ScriptedEngine()) as server, trio_websocket.open_websocket_url(server.url) as socket:
        events = [MSGPACK.decode_server(await socket.get_message())]
        await socket.send_message(
            MSGPACK.encode_client(GenerateRequest(id=1, prompt="hi", sampling=SamplingParams(max_tokens=3)))
        )
        while not isinstance(events[-1], Finished):
            events.append(MSGPACK.decode_server(await socket.get_message()))
    hello, accepted, *tokens, finished = events
    assert isinstance(hello, Hello)
    assert hello.model == "scripted"
    assert accepted == Accepted(1, 2, 0, 7)
    assert all(isinstance(frame, Tokens) for frame in tokens)
    assert "".join(frame.text for frame in tokens) == "abc"
    assert finished.finish_reason == "length"
