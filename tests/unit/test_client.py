"""The client against a server on the other end of an in-memory stream, in virtual time."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, get_type_hints

import numpy as np
import pytest
import trio
import trio.testing
import trio_websocket
from trio.testing import MemoryReceiveStream, MemorySendStream, MockClock, memory_stream_pair

from wsbatch.client import (
    Client,
    ConnectOptions,
    ConnectParams,
    GenerateParams,
    ProtocolError,
    Refused,
    TokenStream,
    open_client,
)
from wsbatch.client.dial import parse_url
from wsbatch.client.options import ScriptParams
from wsbatch.client.progress import most_answer_bytes
from wsbatch.client.request import build_request
from wsbatch.errors import (
    BY_CODE,
    BadRequest,
    ConnectionLost,
    Draining,
    QueueFull,
    QuotaExceeded,
    RequestError,
    Shed,
    TooLarge,
    Unauthorized,
)
from wsbatch.messages import (
    Accepted,
    BatchReport,
    Cancel,
    ChatMessage,
    ClientMessage,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Limits,
    RequestId,
    SamplingParams,
    ServerMessage,
    Started,
    Status,
    Timing,
    Tokens,
    Usage,
)
from wsbatch.wire import JSON, MSGPACK, Codec

LIMITS = Limits(max_model_len=100, max_message_bytes=1000, max_live_requests=8, max_logprobs=20)
HELLO = Hello(1, "tiny", "wsbatch/test", LIMITS, "ready")


def accepted(id: RequestId) -> Accepted:
    return Accepted(id, prompt_tokens=3, requests_ahead=0, seed=7)


def tokens(id: RequestId, index: int, *token_ids: int, text: str = "") -> Tokens:
    return Tokens(id, index, token_ids, text)


def finished(id: RequestId, text: str = "", **fields: Any) -> Finished:
    return Finished(id, "stop", text, Usage(3, 4), Timing(1.0, 2.0, 3.0, 4.0), BatchReport(1, 1.0, 4, 4, 0.0), **fields)


class Peer:
    """The server's end: sends what a test tells it to, and hands over what it received."""

    def __init__(self, nursery: trio.Nursery, codec: Codec = MSGPACK) -> None:
        self.client_stream, self.stream = memory_stream_pair()
        self.nursery = nursery
        self.codec = codec
        self.websocket: trio_websocket.WebSocketConnection
        self.headers: dict[bytes, bytes] = {}

    async def request(self) -> trio_websocket.WebSocketRequest:
        request = await trio_websocket.wrap_server_stream(self.nursery, self.stream)
        self.headers = dict(request.headers)
        return request

    async def greet(self, *messages: ServerMessage, subprotocol: str | None = "the codec's") -> None:
        if subprotocol == "the codec's":
            subprotocol = self.codec.subprotocol
        self.websocket = await (await self.request()).accept(subprotocol=subprotocol)
        await self.send(*(messages or (HELLO,)))

    async def send(self, *messages: ServerMessage) -> None:
        for message in messages:
            await self.websocket.send_message(self.codec.encode_server(message))

    def put(self, data: bytes) -> None:
        """Let the server read this, as if it had come from the client."""
        assert isinstance(self.stream.receive_stream, MemoryReceiveStream)
        self.stream.receive_stream.put_data(data)

    async def receive(self) -> ClientMessage:
        with trio.fail_after(5):
            return self.codec.decode_client(await self.websocket.get_message())

    async def receive_request(self) -> GenerateRequest:
        message = await self.receive()
        assert isinstance(message, GenerateRequest)
        return message

    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[Client]:
        self.nursery.start_soon(self.greet)
        options = {"subprotocol": self.codec.subprotocol, "keepalive_s": None} | options
        # Virtual seconds: a test that would wait for ever fails instead.
        with trio.fail_after(10_000):
            async with open_client(self.client_stream, "test", **options) as client:
                yield client


@pytest.fixture
def peer(nursery: trio.Nursery) -> Peer:
    return Peer(nursery)


async def rest_of(stream: TokenStream) -> list[Any]:
    return [event async for event in stream]


# --- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])
async def test_events_come_as_they_were_sent(nursery: trio.Nursery, autojump_clock: MockClock, codec: Codec) -> None:
    peer = Peer(nursery, codec)
    async with peer.connected() as client:
        assert client.hello == HELLO
        async with client.generate("hi", max_tokens=5, temperature=0.5, stop="END") as stream:
            request = await peer.receive_request()
            assert request.prompt == "hi"
            assert request.sampling == SamplingParams(max_tokens=5, temperature=0.5, stop=("END",))
            id = request.id
            events: list[ServerMessage] = [
                accepted(id),
                tokens(id, 0, 5, 6, text="a"),
                tokens(id, 2, 7, text="b"),
                finished(id),
            ]
            await peer.send(*events)
            assert await rest_of(stream) == events
            assert await rest_of(stream) == []
    with pytest.raises(trio_websocket.ConnectionClosed) as closed:
        await peer.websocket.get_message()
    assert closed.value.reason is not None
    assert closed.value.reason.code == 1000, "nothing was sent after the request: it had ended"


async def test_a_completion_is_put_together(peer: Peer, autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async def answer() -> None:
        request = await peer.receive_request()
        assert request.messages == (ChatMessage("user", "hi"),)
        first = Tokens(request.id, 0, (5,), "a", ((-0.5, ((5, -0.5),)),))
        second = Tokens(request.id, 1, (6,), "", ((-0.25, ()),))
        await peer.send(accepted(request.id), first, second, finished(request.id, "tail"))

    async with peer.connected() as client:
        nursery.start_soon(answer)
        completion = await client.complete([{"role": "user", "content": "hi"}], logprobs=1)
    assert (completion.text, completion.token_ids) == ("atail", (5, 6))
    assert completion.logprobs == ((-0.5, ((5, -0.5),)), (-0.25, ()))
    assert completion.accepted.seed == 7
    assert completion.finished.finish_reason == "stop"


async def test_a_completion_without_streaming(peer: Peer, autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    async def answer() -> None:
        request = await peer.receive_request()
        assert not request.stream
        await peer.send(accepted(request.id), finished(request.id, "all of it", token_ids=(1, 2, 3)))

    async with peer.connected() as client:
        nursery.start_soon(answer)
        completion = await client.complete([1, 2], stream=False)
    assert (completion.text, completion.token_ids, completion.logprobs) == ("all of it", (1, 2, 3), None)


async def test_leaving_early_cancels_and_late_frames_are_dropped(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client:
        async with client.generate("hi") as stream:
            id = (await peer.receive_request()).id
            await peer.send(accepted(id), tokens(id, 0, 5))
            assert await anext(stream) == accepted(id)
        assert await peer.receive() == Cancel(id)
        await peer.send(tokens(id, 1, 6), finished(id))
        async with client.generate("again") as stream:
            request = await peer.receive_request()
            assert request.id != id
            await peer.send(accepted(request.id), finished(request.id))
            assert await rest_of(stream) == [accepted(request.id), finished(request.id)]


async def test_a_slow_consumer_holds_up_nobody(peer: Peer, autojump_clock: MockClock) -> None:
    async with (
        peer.connected() as client,
        client.generate("slow", max_tokens=500) as slow,
        client.generate("quick") as quick,
    ):
        first, second = (await peer.receive_request()).id, (await peer.receive_request()).id
        await peer.send(accepted(first), *(tokens(first, i, i) for i in range(500)), accepted(second), finished(second))
        assert await rest_of(quick) == [accepted(second), finished(second)]
        await peer.send(finished(first))
        assert len(await rest_of(slow)) == 502


async def test_many_at_once(peer: Peer, autojump_clock: MockClock, nursery: trio.Nursery) -> None:
    results = {}

    async def ask(client: Client, prompt: str) -> None:
        results[prompt] = (await client.complete(prompt)).text

    async def answer_in_reverse() -> None:
        requests = [await peer.receive_request() for _ in range(50)]
        for request in reversed(requests):
            await peer.send(accepted(request.id), finished(request.id, f"answer to {request.prompt}"))

    async with peer.connected() as client:
        nursery.start_soon(answer_in_reverse)
        async with trio.open_nursery() as asking:
            for i in range(50):
                asking.start_soon(ask, client, str(i))
    assert results == {str(i): f"answer to {i}" for i in range(50)}


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([accepted(1), tokens(1, 1, 5)], "token 0 was due, got 1"),
        ([accepted(1), tokens(1, 0, 5, 6), tokens(1, 1, 6)], "token 2 was due, got 1"),
        ([accepted(1), tokens(1, 0, 1, 2, 3, 4)], "over 3 tokens"),
        ([accepted(1), finished(1, token_ids=(1, 2, 3, 4))], "over 3 tokens"),
        ([tokens(1, 0, 5)], "tokens without having been accepted"),
        ([finished(1)], "finished without having been accepted"),
        ([Started(1)], "started without having been accepted"),
        ([accepted(1), accepted(1)], "accepted twice"),
        ([accepted(1), Started(1), Started(1)], "started twice"),
        ([accepted(1), Tokens(1, 0, (5,), "", ((-0.5, ()),))], "0 logprobs were due, got 1"),
        ([accepted(1), tokens(1, 0, 5, text="x" * 10_000)], "over 2048 characters of 1 tokens"),
    ],
)
async def test_frames_out_of_order_end_that_stream_only(
    peer: Peer, autojump_clock: MockClock, events: list[ServerMessage], word: str
) -> None:
    async with (
        peer.connected() as client,
        client.generate("a", max_tokens=3) as broken,
        client.generate("b") as whole,
    ):
        assert (await peer.receive_request()).id == 1
        id = (await peer.receive_request()).id
        await peer.send(*events, accepted(id), tokens(id, 0, 5), finished(id))
        with pytest.raises(ProtocolError, match=word):
            await rest_of(broken)
        assert len(await rest_of(whole)) == 3
        if not isinstance(events[-1], Finished):
            assert await peer.receive() == Cancel(1)


async def test_a_server_that_sends_statuses_unasked_fills_no_memory(peer: Peer, autojump_clock: MockClock) -> None:
    status = Status("ready", 0, 0, 0, 0, 8, 0.0, 0.0)
    async with peer.connected() as client:
        peer.nursery.start_soon(lambda: peer.send(*(status for _ in range(1000))))
        await trio.sleep(1)
        assert len(client._statuses) <= 16


async def test_resumed_tokens_are_counted(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a", resume_token_ids=[5, 6]) as stream:
        await peer.receive_request()
        await peer.send(accepted(1), tokens(1, 2, 7), finished(1))
        assert len(await rest_of(stream)) == 3


async def test_a_cancelled_iteration_loses_nothing(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a") as stream:
        await peer.receive_request()
        with trio.move_on_after(1):
            await anext(stream)
        await peer.send(accepted(1))
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert await anext(stream) == accepted(1)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", BY_CODE)
async def test_every_code_has_its_exception(peer: Peer, autojump_clock: MockClock, code: str) -> None:
    async with peer.connected() as client, client.generate("a") as stream:
        await peer.receive_request()
        await peer.send(Failed(1, code, BY_CODE[code].status, "because", 1500))
        with pytest.raises(BY_CODE[code], match="because") as caught:
            await rest_of(stream)
        assert caught.value.retry_after_ms == 1500
        with pytest.raises(BY_CODE[code]):
            await anext(stream)


async def test_an_unknown_code_is_kept(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a") as stream:
        await peer.receive_request()
        await peer.send(Failed(1, "teapot", 418, "short and stout"))
        with pytest.raises(RequestError) as caught:
            await rest_of(stream)
    assert (caught.value.code, caught.value.status, caught.value.message) == ("teapot", 418, "short and stout")
    assert RequestError.code == "model_error"


async def test_tokens_before_an_error_are_delivered(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a") as stream:
        await peer.receive_request()
        await peer.send(accepted(1), tokens(1, 0, 5), Failed(1, "model_error", 500, "broke"))
        assert await anext(stream) == accepted(1)
        assert await anext(stream) == tokens(1, 0, 5)
        with pytest.raises(BY_CODE["model_error"]):
            await anext(stream)


async def test_values_without_a_form_on_the_wire_stay_here(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client:
        with pytest.raises(BadRequest):
            await client.complete("\ud800")
        with pytest.raises(TooLarge, match="1000"):
            await client.complete("x" * 1000)
        with pytest.raises(TypeError, match="temprature"):
            await client.complete("x", temprature=1)  # type: ignore[call-arg]
        async with client.generate("fine") as stream:
            id = (await peer.receive_request()).id
            await peer.send(accepted(id), finished(id))
            assert len(await rest_of(stream)) == 2


# --- retries --------------------------------------------------------------------------------------------------------


async def test_a_refusal_is_retried_when_the_server_says(
    peer: Peer, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    times = []

    async def answer() -> None:
        for _ in range(2):
            request = await peer.receive_request()
            times.append(trio.current_time())
            await peer.send(Failed(request.id, "queue_full", 503, "full", 2000))
        request = await peer.receive_request()
        times.append(trio.current_time())
        await peer.send(accepted(request.id), finished(request.id, "at last"))

    async with peer.connected(jitter=lambda: 0.25) as client:
        nursery.start_soon(answer)
        start = trio.current_time()
        completion = await client.complete("a", retries=2)
    assert completion.text == "at last"
    assert [time - start for time in times] == [0, 2.5, 5.0]


async def test_retries_run_out(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a", retries=1) as stream:
        await peer.send(Failed((await peer.receive_request()).id, "shed", 503, "first", 10))
        peer.nursery.start_soon(refuse_next, peer, "second")
        with pytest.raises(Shed, match="second"):
            await anext(stream)


async def refuse_next(peer: Peer, message: str) -> None:
    await peer.send(Failed((await peer.receive_request()).id, "shed", 503, message, 10))


@pytest.mark.parametrize(
    "events",
    [
        [Failed(1, "shed", 503, "no time given")],
        [accepted(1), tokens(1, 0, 5), Failed(1, "shed", 503, "tokens have come", 10)],
    ],
    ids=["no retry_after", "after a token"],
)
async def test_what_is_not_retried(peer: Peer, autojump_clock: MockClock, events: list[ServerMessage]) -> None:
    async with peer.connected() as client, client.generate("a", retries=5) as stream:
        await peer.receive_request()
        await peer.send(*events)
        with pytest.raises(Shed):
            await rest_of(stream)
        with pytest.raises(trio.TooSlowError):
            await peer.receive()


async def test_a_wait_for_a_retry_can_be_cancelled_and_taken_up_again(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected(jitter=lambda: 0.0) as client, client.generate("a", retries=1) as stream:
        await peer.receive_request()
        await peer.send(Failed(1, "queue_full", 503, "full", 10_000))
        start = trio.current_time()
        with trio.move_on_after(4):
            await anext(stream)
        assert trio.current_time() - start == 4
        peer.nursery.start_soon(finish_next, peer)
        assert isinstance(await anext(stream), Accepted)
        assert isinstance(await anext(stream), Finished)
        assert trio.current_time() - start == 10


async def finish_next(peer: Peer) -> None:
    message = peer.codec.decode_client(await peer.websocket.get_message())
    assert isinstance(message, GenerateRequest)
    await peer.send(accepted(message.id), finished(message.id))


# --- the end of a connection ----------------------------------------------------------------------------------------


async def cut(peer: Peer) -> None:
    await peer.stream.aclose()


async def close_1001(peer: Peer) -> None:
    peer.nursery.start_soon(peer.websocket.aclose, 1001, "drained")


async def send_garbage(peer: Peer) -> None:
    await peer.websocket.send_message(b"\xc1")


async def send_too_much(peer: Peer) -> None:
    await peer.websocket.send_message(b"\x90" * 2_000_000)


async def refuse_and_close(peer: Peer) -> None:
    await peer.send(Failed(None, "bad_request", 400, "not msgpack"))
    peer.nursery.start_soon(peer.websocket.aclose, 1007)


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (cut, "broke"),
        (close_1001, "1001, drained"),
        (send_garbage, "cannot be read"),
        (send_too_much, "a frame of 2000000 bytes"),
        (refuse_and_close, "1007.*not msgpack"),
    ],
)
async def test_every_stream_learns_of_the_end(
    peer: Peer, autojump_clock: MockClock, end: Callable[..., Any], word: str
) -> None:
    async with peer.connected() as client:
        async with client.generate("a") as first, client.generate("b") as second:
            await peer.receive_request()
            await peer.send(accepted(1), tokens(1, 0, 5))
            await end(peer)
            assert await anext(first) == accepted(1)
            assert await anext(first) == tokens(1, 0, 5), "what had arrived is not lost"
            for stream in (first, second):
                with trio.fail_after(1), pytest.raises(ConnectionLost, match=word) as caught:
                    await anext(stream)
                assert isinstance(caught.value.__cause__, BadRequest) == (end is refuse_and_close)
        with pytest.raises(ConnectionLost):
            await client.complete("c")


async def test_draining_is_noted(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client, client.generate("a") as stream:
        await peer.receive_request()
        assert client.draining is None
        await peer.send(DrainingNotice(5000), accepted(1))
        await anext(stream)
        assert client.draining == DrainingNotice(5000)


async def test_a_cancelled_task_leaves_no_half_frame(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected() as client:
        pipe = peer.client_stream.send_stream
        assert isinstance(pipe, MemorySendStream)
        unblocked = trio.Event()

        async def half_then_wait() -> None:
            data = pipe.get_data_nowait()
            peer.put(data[:5])
            await unblocked.wait()  # cancelled here, the rest is lost, as in a socket
            peer.put(data[5:])

        pipe.send_all_hook = half_then_wait
        with trio.move_on_after(1):
            await client.complete("cancelled")
        unblocked.set()
        request = await peer.receive_request()
        assert request.prompt == "cancelled"
        assert await peer.receive() == Cancel(request.id)
        async with client.generate("later"):
            assert (await peer.receive_request()).prompt == "later"


async def doomed_nursery(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """A nursery whose tasks can be ended without the test's own."""
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


@pytest.mark.parametrize("how", ["silent", "blocked"])
async def test_closing_is_bounded(nursery: trio.Nursery, autojump_clock: MockClock, how: str) -> None:
    doomed = await nursery.start(doomed_nursery)
    peer = Peer(doomed)
    async with peer.connected(close_timeout_s=3) as client, client.generate("a"):
        await peer.receive_request()
        if how == "silent":
            doomed.cancel_scope.cancel()
        else:
            pipe = peer.client_stream.send_stream
            assert isinstance(pipe, MemorySendStream)
            pipe.send_all_hook = trio.sleep_forever
        start = trio.current_time()
    assert trio.current_time() - start == 3


async def test_a_silent_server_is_pinged_and_given_up(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    doomed = await nursery.start(doomed_nursery)
    peer = Peer(doomed)
    async with peer.connected(keepalive_s=10) as client, client.generate("a") as stream:
        await peer.receive_request()
        with trio.move_on_after(1000) as waiting:
            await anext(stream)
        assert waiting.cancelled_caught, "the peer answers pings"
        doomed.cancel_scope.cancel()
        start = trio.current_time()
        with pytest.raises(ConnectionLost, match="silent for 20 s"):
            await anext(stream)
        assert 10 <= trio.current_time() - start <= 20
        start = trio.current_time()
    assert trio.current_time() == start, "there is nothing left to close"


# --- opening --------------------------------------------------------------------------------------------------------


async def opening_error(peer: Peer, **options: Any) -> BaseException:
    """What opening raises; outside any nursery of the test's, so that a group would show."""
    try:
        async with open_client(peer.client_stream, "test", **options):
            pytest.fail("opened")
    except Exception as exc:  # noqa: BLE001
        return exc
    pytest.fail("nothing raised")


def test_the_keywords_of_connect_are_the_fields_of_its_options() -> None:
    assert get_type_hints(ConnectParams) == get_type_hints(ConnectOptions)
    assert set(ScriptParams.__annotations__) == {*ConnectParams.__annotations__, *GenerateParams.__annotations__}


def test_the_options_of_a_connection_are_checked_and_their_token_is_not_shown() -> None:
    assert "s3cret" not in repr(ConnectOptions(auth_token="s3cret"))
    assert ConnectOptions(auth_token=" s3cret\n").auth_token == "s3cret"
    for fields, word in (
        ({"auth_token": ""}, "empty"),
        ({"auth_token": "é"}, "ASCII"),
        ({"subprotocol": "x"}, "must be"),
    ):
        with pytest.raises(ValueError, match=word):
            ConnectOptions(**fields)


@pytest.mark.parametrize(
    ("status", "headers", "body", "error", "retry_after_ms"),
    [
        (503, [(b"Retry-After", b"3")], b"", QueueFull, 3000),
        (503, [(b"retry-after", b"Wed, 21 Oct 2026 07:28:00 GMT")], b"busy", QueueFull, None),
        (429, [(b"Retry-After", b"1")], b"", QuotaExceeded, 1000),
        (503, [(b"Retry-After", b"9" * 5000)], b"", QueueFull, 86_400_000),
        (401, [], b"who are you?", Unauthorized, None),
        (404, [], b"no such page", Refused, None),
        (500, [], b"\xff\xfe", Refused, None),
        (
            503,
            [(b"Retry-After", b"1")],
            json.dumps(
                {"type": "error", "code": "draining", "status": 503, "message": "going", "retry_after_ms": 250}
            ).encode(),
            Draining,
            250,
        ),
    ],
)
async def test_a_refused_upgrade(
    peer: Peer,
    autojump_clock: MockClock,
    status: int,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    error: type[Exception],
    retry_after_ms: int | None,
) -> None:
    async def refuse() -> None:
        await (await peer.request()).reject(status, extra_headers=headers, body=body)

    peer.nursery.start_soon(refuse)
    exc = await opening_error(peer)
    assert type(exc) is error
    assert str(status) in str(exc) or error is Draining
    if isinstance(exc, RequestError):
        assert exc.retry_after_ms == retry_after_ms
    if isinstance(exc, Refused):
        assert exc.status == status


async def test_a_refusal_without_end_is_not_read_to_its_end(peer: Peer, autojump_clock: MockClock) -> None:
    async def refuse() -> None:
        await peer.stream.receive_some()
        with suppress(trio.BrokenResourceError):
            await peer.stream.send_all(b"HTTP/1.1 503 full\r\n\r\n")
            while True:
                await peer.stream.send_all(b"x" * 1000)

    peer.nursery.start_soon(refuse)
    exc = await opening_error(peer)
    assert type(exc) is ProtocolError
    assert "more than 131072 bytes" in str(exc)


@pytest.mark.parametrize("codec", [MSGPACK, JSON])
def test_the_longest_answer_is_not_too_long(codec: Codec) -> None:
    sampling = SamplingParams(max_tokens=100, logprobs=20)
    logprobs = (-1.2345678901234567e-5, ((2**31 - 1, -1.2345678901234567e-5),) * 20)
    whole = finished(1, text="\x00" * 1024 * 100, token_ids=(2**31 - 1,) * 100, logprobs=(logprobs,) * 100)
    assert len(codec.encode_server(whole)) < most_answer_bytes(GenerateRequest(sampling=sampling))


async def hang_up(peer: Peer) -> None:
    await peer.stream.receive_some()
    await peer.stream.aclose()


async def answer_nonsense(peer: Peer) -> None:
    await peer.stream.send_all(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


async def say_nothing(peer: Peer) -> None:
    await peer.stream.receive_some()


async def accept_and_say_nothing(peer: Peer) -> None:
    await (await peer.request()).accept(subprotocol=peer.codec.subprotocol)


async def accept_and_hang_up(peer: Peer) -> None:
    await accept_and_say_nothing(peer)
    await peer.stream.aclose()


async def choose_no_subprotocol(peer: Peer) -> None:
    await peer.greet(subprotocol=None)


async def say_another_version(peer: Peer) -> None:
    await peer.greet(Hello(2, "tiny", "wsbatch/9", LIMITS, "ready"))


async def say_something_else(peer: Peer) -> None:
    await peer.greet(DrainingNotice(1))


async def greet_with_text(peer: Peer) -> None:
    websocket = await (await peer.request()).accept(subprotocol=peer.codec.subprotocol)
    await websocket.send_message("hello")


async def greet_with_an_error(peer: Peer) -> None:
    await peer.greet(Failed(None, "draining", 503, "going", 100))


@pytest.mark.parametrize(
    ("behave", "error", "word"),
    [
        (hang_up, ConnectionLost, "closed"),
        (answer_nonsense, ConnectionLost, "upgrade"),
        (say_nothing, ConnectionLost, "within 7 s"),
        (accept_and_say_nothing, ConnectionLost, "within 7 s"),
        (accept_and_hang_up, ConnectionLost, "broke"),
        (choose_no_subprotocol, ProtocolError, "wsbatch.v1.msgpack"),
        (say_another_version, ProtocolError, "version 1"),
        (say_something_else, ProtocolError, "hello"),
        (greet_with_text, ProtocolError, "text message"),
        (greet_with_an_error, Draining, "going"),
    ],
)
async def test_opening_fails_with_one_plain_exception(
    peer: Peer, autojump_clock: MockClock, behave: Callable[..., Any], error: type[Exception], word: str
) -> None:
    peer.nursery.start_soon(behave, peer)
    start = trio.current_time()
    exc = await opening_error(peer, connect_timeout_s=7)
    assert type(exc) is error
    assert word in str(exc)
    assert (trio.current_time() - start > 0) == ("7 s" in word)


@pytest.mark.parametrize("options", [{"subprotocol": "wsbatch.v2"}, {"auth_token": "a\r\nb"}, {"auth_token": "é"}])
async def test_bad_options(peer: Peer, autojump_clock: MockClock, options: dict[str, str]) -> None:
    assert type(await opening_error(peer, **options)) is ValueError


async def test_the_auth_token_is_sent(peer: Peer, autojump_clock: MockClock) -> None:
    async with peer.connected(auth_token="s3cret"):
        pass
    assert peer.headers[b"authorization"] == b"Bearer s3cret"


@pytest.mark.parametrize(
    "error", [ValueError("mine"), trio.TooSlowError(), StopAsyncIteration(), SystemExit(3), KeyboardInterrupt()]
)
async def test_exceptions_of_the_block_come_out_as_they_are(
    peer: Peer, autojump_clock: MockClock, error: BaseException
) -> None:
    async def use() -> None:
        async with peer.connected() as client, client.generate("a"):
            raise error

    with pytest.raises(type(error)) as caught:
        await use()
    assert caught.value is error


async def test_cancelling_the_block_cancels_the_request(peer: Peer, autojump_clock: MockClock) -> None:
    received: list[ClientMessage] = []
    closed = trio.Event()

    async def read() -> None:
        with suppress(trio_websocket.ConnectionClosed):
            while True:
                received.append(peer.codec.decode_client(await peer.websocket.get_message()))
        closed.set()

    with trio.move_on_after(5) as scope:
        async with peer.connected() as client:
            peer.nursery.start_soon(read)
            await client.complete("a")
    assert scope.cancelled_caught
    assert trio.current_time() == 5, "saying so took no time"
    await closed.wait()
    assert peer.websocket.closed is not None
    assert peer.websocket.closed.code == 1000
    assert received == [GenerateRequest(id=1, prompt="a"), Cancel(1)]


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host_header", "port", "target", "tls"),
    [
        ("ws://example.org", "example.org", 80, "/", False),
        ("ws://example.org:8765/a/b?token=x", "example.org:8765", 8765, "/a/b?token=x", False),
        ("wss://example.org", "example.org", 443, "/", True),
        ("wss://example.org:80", "example.org:80", 80, "/", True),
        ("ws://[::1]:9", "[::1]:9", 9, "/", False),
        ("ws://127.0.0.1?x=1", "127.0.0.1", 80, "/?x=1", False),
    ],
)
def test_urls(url: str, host_header: str, port: int, target: str, tls: bool) -> None:
    address = parse_url(url)
    assert (address.host_header, address.port, address.target, address.tls) == (host_header, port, target, tls)


@pytest.mark.parametrize("url", ["http://x", "x:1", "", "ws://", "ws:///path", "ws://x/é", "ws://x:99999"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match=r"ws://|percent|[Pp]ort"):
        parse_url(url)


def test_prompts() -> None:
    turns = (ChatMessage("user", "a"), ChatMessage("assistant", "b"))
    assert build_request("a", {}) == GenerateRequest(prompt="a")
    assert build_request([1, 2], {}) == GenerateRequest(token_ids=(1, 2))
    assert build_request(turns, {}) == GenerateRequest(messages=turns)
    assert build_request([{"role": "user", "content": "a"}, turns[1]], {}) == GenerateRequest(messages=turns)
    whole = GenerateRequest(prompt="a", priority=1, sampling=SamplingParams(seed=3))
    assert build_request(whole, {"top_k": 4}) == GenerateRequest(
        prompt="a", priority=1, sampling=SamplingParams(seed=3, top_k=4)
    )
    assert build_request(range(2), {}) == GenerateRequest(token_ids=(0, 1))
    assert build_request([], {}) == GenerateRequest(token_ids=()), "the server says what it thinks of that"


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "prompt must be a str, token ids, messages or a GenerateRequest, got int"),
        (None, "prompt must be .* got NoneType"),
        (b"abc", "prompt must be .* got bytes"),
        (bytearray(b"abc"), "prompt must be .* got bytearray"),
        (memoryview(b"abc"), "prompt must be .* got memoryview"),
        ({1, 2}, "prompt must be .* got set"),
        (USER, "prompt must be .* got dict"),
        ((id for id in (1, 2)), "prompt must be .* got generator"),
        (np.array([1, 2]), "prompt must be .* got ndarray"),
        (list(np.array([1, 2])), r"token_ids\[0\] must be int, got int64"),
        ([1, "a"], r"token_ids\[1\] must be int, got str"),
        ([1, 2.0], r"token_ids\[1\] must be int, got float"),
        ([True], r"token_ids\[0\] must be int, got bool"),
        ([1, USER], r"token_ids\[1\] must be int, got dict"),
        (["a", "b"], r"token_ids\[0\] must be int, got str"),
        ([USER, 1], r"messages\[1\] must be a ChatMessage .* got int"),
        ([{"role": "user"}], r"messages\[0\] must be a ChatMessage .* got keys role"),
        ([USER | {"name": "x"}], r"messages\[0\] must be a ChatMessage .* got keys role, content, name"),
        ([USER | {"content": b"a"}], r"messages\[0\]\.content must be str, got bytes"),
        ([ChatMessage("user", None)], r"messages\[0\]\.content must be str, got NoneType"),  # type: ignore[arg-type]
        (GenerateRequest(prompt=b"abc"), "prompt must be str, got bytes"),  # type: ignore[arg-type]
        (GenerateRequest(token_ids=b"abc"), "token_ids must be a sequence of int, got bytes"),  # type: ignore[arg-type]
        (GenerateRequest(messages="abc"), "messages must be a sequence of ChatMessage, got str"),  # type: ignore[arg-type]
        (GenerateRequest(prompt="a", sampling=SamplingParams(stop="abc")), "stop must be a sequence of str, got str"),  # type: ignore[arg-type]
    ],
)
def test_a_prompt_of_another_type(prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        build_request(prompt, {})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": b"ab"}, "stop must be a sequence of str, got bytes"),
        ({"stop": [b"ab"]}, r"stop\[0\] must be str, got bytes"),
        ({"stop": 5}, "stop must be a sequence of str, got int"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids must be a sequence of int, got bytes"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a sequence of int, got str"),
        ({"stop_token_ids": [1, False]}, r"stop_token_ids\[1\] must be int, got bool"),
        ({"resume_token_ids": bytearray(b"a")}, "resume_token_ids must be a sequence of int, got bytearray"),
        ({"resume_token_ids": iter([1])}, "resume_token_ids must be a sequence of int, got list_iterator"),
        ({"resume_token_ids": np.array([1])}, "resume_token_ids must be a sequence of int, got ndarray"),
        ({"max_tokens": 5.0}, "max_tokens must be int, got float"),
        ({"max_tokens": np.int64(5)}, "max_tokens must be int, got int64"),
        ({"logprobs": True}, "logprobs must be int, got bool"),
        ({"temperature": "1"}, "temperature must be float, got str"),
        ({"temperature": np.float32(1)}, "temperature must be float, got float32"),
        ({"stream": 0}, "stream must be bool, got int"),
    ],
)
def test_a_parameter_of_another_type(params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}$"):
        build_request("a", params)


def test_what_is_none_is_left_to_the_server() -> None:
    assert build_request("a", {"max_tokens": None}).sampling.max_tokens is None  # type: ignore[typeddict-item]
    assert build_request("a", {"temperature": np.float64(1), "top_p": 1}).sampling == SamplingParams(temperature=1)


def test_parameters_are_those_of_the_messages() -> None:
    request = build_request(
        "a",
        {
            "max_tokens": 1,
            "temperature": 2.0,
            "top_p": 0.5,
            "top_k": 4,
            "seed": 5,
            "stop": ["x"],
            "stop_token_ids": [6],
            "ignore_eos": True,
            "logprobs": 7,
            "priority": 8,
            "timeout_ms": 9,
            "queue_timeout_ms": 10,
            "stream": False,
            "resume_token_ids": [11],
            "parse_special": True,
        },
    )
    assert request == GenerateRequest(
        prompt="a",
        sampling=SamplingParams(1, 2.0, 0.5, 4, 5, ("x",), (6,), True, 7),
        priority=8,
        timeout_ms=9,
        queue_timeout_ms=10,
        stream=False,
        resume_token_ids=(11,),
        parse_special=True,
    )
