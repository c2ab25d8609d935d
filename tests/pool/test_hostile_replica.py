"""A replica that says anything at all ends nothing but its own connections: frames at random, in virtual time."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio
import trio_websocket
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from wsbatch.client import Client, open_client
from wsbatch.client.errors import printable
from wsbatch.errors import BY_CODE, RequestError
from wsbatch.messages import (
    Accepted,
    BatchReport,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    GetStatus,
    Hello,
    Limits,
    Pong,
    SamplingParams,
    ServerMessage,
    Started,
    Status,
    Timing,
    Tokens,
    Usage,
)
from wsbatch.testing import memory_stream_pair
from wsbatch.wire import MSGPACK

from .harness import Cluster, Reader, cluster, request

THOROUGH = settings().max_examples if settings.get_current_profile_name() == "thorough" else 25
MOST = 2**53 - 1
HELLO = Hello(1, "simulated", "hostile", Limits(8192, 2**20, 64, 20), "ready", revision="simulated-1", dtype="float32")
IDLE = Status("ready", 0, 0, 0, 0, 8, 0.0, 0.0)

counts = st.sampled_from([0, 1, 2, 40, 10**6, MOST])
sizes = st.sampled_from([0.0, 0.5, 1e9, float(MOST)])
texts = st.sampled_from(["", "a", "ready", "dead", "x" * 5000, "\x1b[2J\n\r", "simulated-1"])
ids = st.sampled_from([1, 2, 3, 4, 5, -1, MOST, "1", "a" * 200])
token_ids = st.lists(st.sampled_from([0, 97, 2**31 - 1]), max_size=50).map(tuple)
logprobs = st.none() | st.lists(st.tuples(st.just(-1.0), st.just(())), max_size=3).map(tuple)
frames: st.SearchStrategy[ServerMessage] = st.one_of(
    st.builds(Accepted, ids, counts, counts, counts),
    st.builds(Started, ids),
    st.builds(Tokens, ids, counts, token_ids, texts, logprobs),
    st.builds(
        Finished,
        ids,
        st.sampled_from(["stop", "length", "cancelled", "timeout", "shutdown", "x" * 300]),
        texts,
        st.builds(Usage, counts, counts, counts),
        st.builds(Timing, sizes, sizes, sizes, sizes, sizes),
        st.builds(BatchReport, counts, sizes, counts, counts, sizes),
        st.none() | token_ids,
        logprobs,
    ),
    st.builds(Failed, st.none() | ids, st.sampled_from([*BY_CODE, "x" * 300, "\n"]), counts, texts, st.none() | counts),
    st.builds(DrainingNotice, counts),
    st.builds(Pong, ids),
    st.builds(Status, texts, counts, counts, counts, counts, counts, sizes, sizes, st.none() | counts),
    st.just(HELLO),
)


@dataclass(frozen=True)
class Act:
    """What it does next: send a frame or bytes, close with a code, or cut the connection."""

    what: ServerMessage | bytes | int | None
    after_s: float


acts = st.builds(
    Act,
    st.one_of(
        frames,
        frames,
        frames,
        st.sampled_from([b"", b"\xc1", b"\x80", b"\xdc\xff\xff", b"\x81\xa4type\xa6tokens", b"\x91" * 2000]),
        st.sampled_from([1000, 1001, 1007, 1011, 1013, 4999]),
        st.none(),
    ),
    st.sampled_from([0.0, 0.0, 0.001, 0.1, 2.0]),
)
heads = st.sampled_from(
    [
        b"",
        b"HTTP/1.1 503 Full\r\nRetry-After: " + b"9" * 5000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 401 No\r\nContent-Length: 5\r\n\r\n\xff\xfe\x1b[m",
        b'HTTP/1.1 503 Full\r\nContent-Length: 13\r\n\r\n{"type":' + b'"1"}\n',
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x00" * 100,
    ]
)


@dataclass(frozen=True)
class Manners:
    """Of one connection: what is said instead of an upgrade, first, to each question, and after each request."""

    head: bytes
    hello: Act
    answers: tuple[Act, ...]
    acts: tuple[Act, ...]


manners = st.builds(
    Manners,
    st.just(b"") | heads,
    st.just(Act(HELLO, 0.0)) | acts,
    st.just((Act(IDLE, 0.0),)) | st.lists(acts, max_size=3).map(tuple),
    st.lists(acts, min_size=1, max_size=8).map(tuple),
)


class Hostile:
    """A server of these manners, one for each connection in turn. Ids that requests have are put in now and then."""

    def __init__(self, turns: list[Manners], nursery: trio.Nursery) -> None:
        self.turns = turns
        self.dials = 0
        self._nursery = nursery

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Client]:
        here, there = memory_stream_pair()
        turn = self.turns[self.dials % len(self.turns)]
        self.dials += 1
        self._nursery.start_soon(self._serve, there, turn)
        async with open_client(here, "hostile", keepalive_s=None, connect_timeout_s=5.0) as client:
            yield client

    async def _serve(self, stream: trio.abc.Stream, turn: Manners) -> None:
        with suppress(Exception):
            if turn.head:
                await stream.receive_some()
                await stream.send_all(turn.head)
                return
            async with trio.open_nursery() as nursery:
                asked = await trio_websocket.wrap_server_stream(nursery, stream)
                websocket = await asked.accept(subprotocol=MSGPACK.subprotocol)
                await self._act(websocket, stream, turn.hello, 1)
                while True:
                    message = MSGPACK.decode_client(await websocket.get_message())
                    todo = turn.answers if isinstance(message, GetStatus) else ()
                    if isinstance(message, GenerateRequest):
                        todo = turn.acts
                    for act in todo:
                        await self._act(websocket, stream, act, getattr(message, "id", 1))
        await trio.aclose_forcefully(stream)

    async def _act(self, websocket: Any, stream: trio.abc.Stream, act: Act, id: Any) -> None:
        await trio.sleep(act.after_s)
        match act.what:
            case None:
                await trio.aclose_forcefully(stream)
            case int(code):
                await websocket.aclose(code, "\x1b[2J\n")
            case bytes(data):
                await websocket.send_message(data)
            case frame:
                if getattr(frame, "id", None) == 1:
                    frame = replace(frame, id=id)  # type: ignore[call-arg, arg-type]
                await websocket.send_message(MSGPACK.encode_server(frame))  # type: ignore[arg-type]


@settings(max_examples=THOROUGH, deadline=None)
@given(turns=st.lists(manners, min_size=1, max_size=6))
def test_whatever_a_replica_says_ends_nothing_but_its_own_connections(turns: list[Manners]) -> None:
    trio.run(beside_a_good_one, turns, clock=MockClock(autojump_threshold=0))


async def beside_a_good_one(turns: list[Manners]) -> None:
    fields: dict[str, Any] = {"accept_timeout_s": 2.0, "request_stall_s": 5.0, "stall_s": 3.0, "resume_timeout_s": 5.0}
    async with cluster(1, **fields) as group, trio.open_nursery() as nursery:
        hostile = Hostile(turns, nursery)
        group.pool.add("z", hostile.dial)
        ended: list[Reader | RequestError] = []

        async def ask(index: int) -> None:
            sampling = SamplingParams(max_tokens=40, logprobs=index % 3 or None)
            try:
                stream = await group.pool.submit(request(prompt=f"p{index % 4}", sampling=sampling))
            except RequestError as error:
                ended.append(error)
            else:
                ended.append(await Reader(stream).read())

        with trio.fail_after(600):
            async with trio.open_nursery() as asking:
                for index in range(20):
                    asking.start_soon(ask, index)
                    await trio.sleep(0.5)
        assert len(ended) == 20
        assert hostile.dials >= 1
        check_labels(group)
        # The pool lives, and the other replica does as ever.
        await group.pool.remove("z")
        reader = await Reader(await group.pool.submit(request(prompt="after"))).read()
        reader.check_undisturbed()
        nursery.cancel_scope.cancel()


def check_labels(group: Cluster) -> None:
    for metric in group.pool.metrics.registry.collect():
        for sample in metric.samples:
            assert all(len(value) < 30 and value.isprintable() for value in sample.labels.values()), sample


@pytest.mark.parametrize(
    "frame",
    [
        lambda id: Finished(id, "stop", "", Usage(1, 1), Timing(0, 0, 0, 0), BatchReport(1, 1.0, 1, 1, 0.0)),
        lambda id: Tokens(id, 0, (97,), "a"),
        lambda id: Failed(id, "x" * 300, 500, "\x1b[2J"),
    ],
    ids=["finished first", "tokens first", "a code of its own"],
)
async def test_a_frame_that_cannot_come_now_is_the_replicas_fault(
    autojump_clock: MockClock, frame: Callable[[int], ServerMessage]
) -> None:
    turn = Manners(b"", Act(HELLO, 0.0), (Act(IDLE, 0.0),), (Act(frame(1), 0.0),))
    async with cluster(1) as group, trio.open_nursery() as nursery:
        group.pool.add("z", Hostile([turn], nursery).dial)
        await group.all_ready()
        for index in range(20):
            reader = await Reader(await group.pool.submit(request(prompt=f"p{index % 4}"))).read()
            reader.check_undisturbed()
        assert group.pool.replicas["z"].health.ejected
        check_labels(group)
        nursery.cancel_scope.cancel()


async def test_a_peers_words_are_escaped_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    evil = "\x1b[2J\nFAKE line\r\u202e" + "x" * 10_000
    hello = replace(HELLO, model=evil)
    async with cluster(1) as group, trio.open_nursery() as nursery:
        turns = [
            Manners(b"", Act(hello, 0.0), (), (Act(None, 0.0),)),
            Manners(
                b"HTTP/1.1 403 No\r\nContent-Length: 20\r\n\r\n\x1b[2J\nFAKE line\r\x1b[0m", Act(None, 0.0), (), ()
            ),
            Manners(b"", Act(Failed(None, "draining", 503, evil), 0.0), (), ()),
        ]
        with caplog.at_level(logging.INFO, "wsbatch"):
            group.pool.add("z", Hostile(turns, nursery).dial)
            await trio.sleep(30)
        nursery.cancel_scope.cancel()
    lines = [record.getMessage() for record in caplog.records if " z " in record.getMessage()]
    assert len(lines) >= 3
    for line in lines:
        assert line.isprintable(), line
        assert len(line) < 1200


def test_printable_keeps_what_is_text() -> None:
    assert printable("queue full: 3 waiting – später") == "queue full: 3 waiting – später"
    assert printable("\x1b[2J\n") == "\\x1b[2J\\n"
    assert len(printable("x" * 5000)) == 1001
