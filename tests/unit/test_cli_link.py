"""A conversation's connection: lost, refused, made anew, and the answer gone on with. In virtual time."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import trio
import trio.testing

from wsbatch.cli.link import Link
from wsbatch.client import Client
from wsbatch.errors import BadRequest, ConnectionLost, Draining, QueueFull, WsbatchError
from wsbatch.messages import (
    Accepted,
    BatchReport,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Timing,
    Tokens,
    Usage,
)

ACCEPTED = Accepted(1, prompt_tokens=3, requests_ahead=0, seed=77)


def tokens(index: int, *ids: int) -> Tokens:
    return Tokens(1, index, ids, "".join(chr(id_) for id_ in ids))


def finished(reason: FinishReason = "stop", text: str = "") -> Finished:
    usage, timing, batch = Usage(3, 2), Timing(0, 0, 0, 0), BatchReport(1, 1.0, 5, 5, 0.0)
    return Finished(1, reason, text, usage, timing, batch)


@dataclass
class Server:
    """Answers each request with the next script: events, then perhaps an exception. Down while `down` is set."""

    scripts: list[list[Event | Exception]]
    models: list[str] = field(default_factory=lambda: ["m"])
    down: Callable[[], bool] = lambda: False
    requests: list[GenerateRequest] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    connections: int = 0
    open: int = 0

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Client]:
        await trio.lowlevel.checkpoint()
        if self.down():
            raise ConnectionLost("nobody there")
        model = self.models[min(self.connections, len(self.models) - 1)]
        self.connections += 1
        self.open += 1
        try:
            yield cast(Client, _Connection(self, model))
        finally:
            self.open -= 1


class _Connection:
    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self.hello = type("Hello", (), {"model": model})

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncIterator[AsyncIterator[Event]]:
        self._server.requests.append(request)
        self._server.asked_at.append(trio.current_time())
        script = self._server.scripts.pop(0)

        async def events() -> AsyncIterator[Event]:
            for item in script:
                await trio.lowlevel.checkpoint()
                if isinstance(item, Exception):
                    raise item
                yield item

        async with aclosing(events()) as stream:
            yield stream


async def ask(server: Server, *, max_tokens: int = 10, seed: int | None = None) -> tuple[str, list[str]]:
    """The text of one answer and what was notified; raises what Link.ask raises."""
    text: list[str] = []
    notes: list[str] = []
    request = GenerateRequest(prompt="abc", sampling=SamplingParams(max_tokens=max_tokens, seed=seed))

    async def tell(event: Event) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(event, Tokens | Finished):
            text.append(event.text)

    raised: Exception | None = None
    async with trio.open_nursery() as nursery:
        link = Link(nursery, server.dial, notify=notes.append)
        try:
            await link.ask(request, tell)
        except WsbatchError as error:
            raised = error
        link.drop()
    assert server.open == 0
    if raised is not None:
        raise raised
    return "".join(text), notes


async def test_a_whole_answer_takes_one_request(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[ACCEPTED, tokens(0, 65), tokens(1, 66), finished(text="!")]])
    assert await ask(server) == ("AB!", [])
    assert (len(server.requests), server.connections) == (1, 1)


@pytest.mark.parametrize(
    "end", [ConnectionLost("gone"), finished("shutdown", text="held back")], ids=["lost", "shutdown"]
)
async def test_a_cut_answer_goes_on_where_it_stopped(
    autojump_clock: trio.testing.MockClock, end: Event | Exception
) -> None:
    server = Server([[ACCEPTED, tokens(0, 65, 66), end], [ACCEPTED, tokens(2, 67), finished()]])
    text, notes = await ask(server)
    assert text == "ABC"
    assert server.connections == 2
    assert len(notes) == 1
    assert server.requests[0].resume_token_ids == ()
    assert server.requests[1].resume_token_ids == (65, 66)
    assert server.requests[1].sampling.seed == ACCEPTED.seed  # else the rest would be of another run


async def test_an_answer_that_lacks_only_its_end_gets_what_was_held_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = Server([[ACCEPTED, tokens(0, 65, 66), ConnectionLost("gone")], [ACCEPTED, finished("length", text="!")]])
    assert (await ask(server, max_tokens=2))[0] == "AB!"
    assert server.requests[1].resume_token_ids == (65, 66)


async def test_another_model_does_not_go_on_with_it(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[ACCEPTED, tokens(0, 65), ConnectionLost("gone")]], models=["m", "other"])
    with pytest.raises(WsbatchError, match=r"'other'.*'m'"):
        await ask(server)


async def test_another_model_may_answer_from_the_start(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[ConnectionLost("gone")], [ACCEPTED, tokens(0, 65), finished()]], models=["m", "other"])
    assert (await ask(server))[0] == "A"


async def test_a_refusal_is_retried_when_the_server_says_on_the_same_connection(
    autojump_clock: trio.testing.MockClock,
) -> None:
    server = Server([[QueueFull("full", retry_after_ms=3000)], [ACCEPTED, tokens(0, 65), finished()]])
    text, _ = await ask(server)
    assert text == "A"
    assert server.connections == 1
    assert 3 <= server.asked_at[1] - server.asked_at[0] <= 6


async def test_a_draining_server_is_left(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[Draining("closing", retry_after_ms=1000)], [ACCEPTED, tokens(0, 65), finished()]])
    assert (await ask(server))[0] == "A"
    assert server.connections == 2


async def test_what_cannot_be_mended_is_raised_at_once(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[BadRequest("top_p: must be at most 1")]])
    with pytest.raises(BadRequest, match="top_p"):
        await ask(server)
    assert trio.current_time() == server.asked_at[0]


async def test_a_server_that_stays_away_is_given_up_within_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    tries: list[float] = []

    def down() -> bool:
        tries.append(trio.current_time())
        return True

    began_s = trio.current_time()
    with pytest.raises(ConnectionLost, match="nobody there"):
        await ask(Server([], down=down))
    assert 30 < trio.current_time() - began_s <= 60
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert gaps[0] < 0.5  # a blip costs little
    assert max(gaps) <= 8
    assert len(tries) < 30


async def test_patience_is_renewed_by_every_token(autojump_clock: trio.testing.MockClock) -> None:
    # Away for 40 s after each of four tokens: more than a minute in all.
    asked_at: list[float] = []

    def down() -> bool:
        return bool(asked_at) and trio.current_time() < asked_at[-1] + 40

    scripts: list[list[Event | Exception]] = [
        [ACCEPTED, tokens(index, 65 + index), ConnectionLost("gone")] for index in range(4)
    ]
    server = Server([*scripts, [ACCEPTED, finished()]], down=down, asked_at=asked_at)
    text, notes = await ask(server)
    assert text == "ABCD"
    assert len(notes) == 4  # one for each time it was away, however often it was tried
    assert trio.current_time() - asked_at[0] > 120


async def test_a_cancelled_answer_leaves_the_connection_for_the_next(autojump_clock: trio.testing.MockClock) -> None:
    server = Server([[ACCEPTED, tokens(0, 65), finished()]])
    told: list[Event] = []

    async def hang(event: Event) -> None:
        told.append(event)
        await trio.sleep_forever()

    async def note(event: Event) -> None:
        told.append(event)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        link = Link(nursery, server.dial, notify=lambda text: None)
        with trio.move_on_after(1) as scope:
            await link.ask(GenerateRequest(prompt="abc"), hang)
        assert scope.cancelled_caught
        assert server.open == 1
        server.scripts.append([ACCEPTED, finished()])
        await link.ask(GenerateRequest(prompt="abc"), note)
        link.drop()
    assert server.connections == 1
