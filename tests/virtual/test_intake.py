"""The way into the queue: what is refused, in which words, who gives way, and that no place is ever lost."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from wsbatch.batching.admission import Admission
from wsbatch.batching.fairness import Client
from wsbatch.config import EngineConfig, ServerConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.stream import Stream
from wsbatch.errors import BadRequest, NeverFits, QueueFull, QueueTimeout, RequestError
from wsbatch.messages import ChatMessage, Failed, Finished, GenerateRequest, SamplingParams
from wsbatch.server.serve import Server
from wsbatch.testing import BareClient, MemoryListener, open_virtual_engine
from wsbatch.text import ByteText
from wsbatch.text.detokenize import Detokenizer
from wsbatch.wire import JSON
from wsbatch.wire.generate import GenerateFields


class Panic(BaseException):
    """As pyo3 raises a Rust panic: no Exception."""


class Stumbling:
    """A detokenizer that raises at its `after`-th id, or at the end."""

    def __init__(self, inner: Detokenizer, after: int | None) -> None:
        self.inner, self.after = inner, after

    def push(self, token_id: int) -> str:
        if self.after == 0:
            raise Panic("no such piece")
        self.after = None if self.after is None else self.after - 1
        return self.inner.push(token_id)

    def flush(self) -> str:
        if self.after is not None:
            raise Panic("half a piece")
        return self.inner.flush()


class Fragile(ByteText):
    """Raises over some prompts, as a tokenizer without an unknown token does; and over the output where told."""

    decoding: int | None = None

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        if text == "zebra":
            raise Exception("WordLevel error: Missing [UNK] token from the vocabulary")
        if text == "panic":
            raise Panic("index out of bounds")
        return [9999] if text == "added" else super().encode(text)

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        raise RecursionError("maximum recursion depth exceeded")

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        if self.decoding == -1:
            raise Panic("no such prompt")
        plain = super().detokenizer(prompt_ids)
        return plain if self.decoding is None else Stumbling(plain, self.decoding)


def config(**fields: object) -> EngineConfig:
    values = {"model": "simulated", "scheduler": "continuous", "max_batch_size": 1}
    return EngineConfig(**(values | fields))  # type: ignore[arg-type]


def request(tokens: int | None = 4, prompt: str = "abcd", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling=SamplingParams(max_tokens=tokens), **fields)


async def ending(stream: Stream) -> Finished | Failed:
    last: object = None
    async for event in stream:
        last = event
    assert isinstance(last, Finished | Failed)
    return last


def assert_books_balance(engine: BatchEngine) -> None:
    """Nobody is between two places: what admission counts is what the status says."""
    admission, status = engine.core._admission._places, engine.status()
    works = engine.scheduler.queue
    assert (admission.requests, admission.lent) == (status.waiting, 0)
    assert admission.tokens == status.queued_tokens - sum(work.max_new_tokens for work in works)


SAMPLING: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2_000_000),
    ("max_tokens", 2.0),
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("top_p", -1),
    ("top_p", 0),
    ("top_k", -1),
    ("seed", 2**53),
    ("seed", True),
    ("stop", "\n"),
    ("stop", ("",)),
    ("stop", ("a",) * 17),
    ("stop", (7,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", 7),
    ("ignore_eos", 1),
    ("logprobs", 21),
]
REQUEST: list[tuple[str, Any]] = [
    ("id", 2**53),
    ("id", "x" * 65),
    ("priority", 10),
    ("priority", "high"),
    ("timeout_ms", 0),
    ("timeout_ms", float("inf")),
    ("queue_timeout_ms", -5),
    ("stream", "no"),
    ("parse_special", 1),
    ("resume_token_ids", (-1,)),
    ("resume_token_ids", (1, "2")),
    ("token_ids", (1,)),  # and a prompt
]


@pytest.mark.parametrize(("name", "value"), SAMPLING + REQUEST)
async def test_a_request_made_here_is_refused_in_the_words_of_the_wire(
    autojump_clock: MockClock, name: str, value: object
) -> None:
    bad = request(8)
    if (name, value) in SAMPLING:
        bad = replace(bad, sampling=replace(bad.sampling, **{name: value}))  # type: ignore[arg-type]
    else:
        bad = replace(bad, **{name: value})  # type: ignore[arg-type]
    frame = {"type": "generate", "id": 1, "prompt": "abcd", "max_tokens": 8, name: value}
    with pytest.raises(RequestError) as on_the_wire:
        JSON._frames.read({key: list(item) if isinstance(item, tuple) else item for key, item in frame.items()})
    async with open_virtual_engine(config(max_queue_requests=1)) as (engine, _):
        for _ in range(3):
            with pytest.raises(type(on_the_wire.value)) as refused:
                await engine.submit(bad)
            assert refused.value.message == on_the_wire.value.message
        assert isinstance(await ending(await engine.submit(request())), Finished)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(priority=None), "priority: must be an integer, got null"),
        (request(stream=None), "stream: must be true or false, got null"),
        (GenerateRequest(prompt="a", sampling=SamplingParams(stop_token_ids=None)), "stop_token_ids: must be an array"),  # type: ignore[arg-type]
        (GenerateRequest(prompt="a", sampling=None), "sampling: must be a SamplingParams, got null"),  # type: ignore[arg-type]
        (
            GenerateRequest(prompt="a", sampling=SamplingParams(top_k=10**5000)),
            "top_k: must be .* over 500 digits",
        ),
        (GenerateRequest(), "give exactly one, got none"),
        (GenerateRequest(prompt=b"bytes"), "prompt: must be a string, got binary data"),  # type: ignore[arg-type]
        (GenerateRequest(prompt=object()), "prompt: must be a string, got an object of type object"),  # type: ignore[arg-type]
        (GenerateRequest(messages=("hi",)), r"messages\[0\]: must be a map with role and content"),  # type: ignore[arg-type]
        (GenerateRequest(messages=(ChatMessage("two words", "hi"),)), r"messages\[0\].role: must be a word"),
    ],
)
async def test_what_only_a_program_can_say_is_refused_as_well(
    autojump_clock: MockClock, bad: GenerateRequest, words: str
) -> None:
    async with open_virtual_engine(config(max_queue_requests=1)) as (engine, _):
        for _ in range(2):
            with pytest.raises(BadRequest, match=words):
                await engine.submit(bad)
        assert isinstance(await ending(await engine.submit(request())), Finished)


async def test_a_request_that_is_well_made_passes_unchanged(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config()) as (engine, _):
        good = replace(request(), id="a", sampling=SamplingParams(3, 1, 1, 5, 7, ("x",), (9,), True, 2), timeout_ms=900)
        assert (await engine.submit(good)).request == good


async def test_a_request_from_a_frame_is_not_read_twice(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a long text once more would hold the event loop."""
    checked: list[GenerateRequest] = []
    check = GenerateFields.check
    monkeypatch.setattr(GenerateFields, "check", lambda self, request: checked.append(request) or check(self, request))
    asked = GenerateRequest(id=1, prompt="x", sampling=SamplingParams(max_tokens=1))
    async with open_virtual_engine(EngineConfig(model="simulated")) as (engine, _), trio.open_nursery() as nursery:
        listener = MemoryListener()
        await nursery.start(Server(engine, ServerConfig(), addresses=[("127.0.0.1", 1)]).run, [listener])
        client = BareClient(await listener.connect())
        await client.open()
        await client.send(asked)
        while not isinstance(await client.receive(), Finished):
            pass
        assert checked == []
        await engine.submit(asked)
        assert checked == [asked]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(prompt="zebra"), r"prompt: the model's tokenizer cannot encode it: Exception: WordLevel error: Miss"),
        (request(prompt="panic"), "prompt: the model's tokenizer cannot encode it: Panic: index out of bounds"),
        (request(prompt="added"), "prompt holds the token 9999, which the model does not have: its vocabulary is 257"),
        (GenerateRequest(messages=(ChatMessage("user", "hi"),)), "messages: .*RecursionError: maximum recursion depth"),
    ],
)
async def test_what_a_tokenizer_raises_is_its_requests_error(
    autojump_clock: MockClock, bad: GenerateRequest, words: str
) -> None:
    async with open_virtual_engine(config(max_queue_requests=2), codec=Fragile()) as (engine, _):
        neighbour = await engine.submit(request())
        for _ in range(3):
            with pytest.raises(BadRequest, match=words):
                await engine.submit(bad)
        assert isinstance(await ending(neighbour), Finished)
        assert_books_balance(engine)


@pytest.mark.parametrize("after", [0, 2, 99])
@pytest.mark.parametrize("scheduler", ["dynamic", "continuous"])
async def test_what_a_tokenizer_raises_over_the_output_is_its_requests_error(
    autojump_clock: MockClock, scheduler: str, after: int
) -> None:
    codec = Fragile()
    async with open_virtual_engine(config(scheduler=scheduler, max_batch_size=2), codec=codec) as (engine, _):
        codec.decoding = after
        broken = await engine.submit(request(stream=after != 2))
        codec.decoding = None
        neighbour = await engine.submit(request())
        end = await ending(broken)
        assert isinstance(end, Failed)
        assert end.code == "model_error"
        assert "tokenizer cannot decode the output: Panic" in end.message
        assert isinstance(await ending(neighbour), Finished)
        codec.decoding = 0
        with pytest.raises(RequestError, match="cannot decode"):
            await engine.submit(request(resume_token_ids=(65,)))
        codec.decoding = -1
        with pytest.raises(RequestError, match="cannot decode the output: Panic: no such prompt"):
            await engine.submit(request())
        codec.decoding = None
        assert isinstance(await ending(await engine.submit(request())), Finished)
        assert_books_balance(engine)


async def test_a_consumer_that_raises_harms_nobody(autojump_clock: MockClock) -> None:
    def raises(stream: Stream) -> None:
        raise RuntimeError("a bug of its own")

    async with open_virtual_engine(config(max_batch_size=2)) as (engine, _):
        stream = await engine.submit(request(), on_event=raises)
        neighbour = await engine.submit(request())
        for each in (stream, neighbour):
            assert isinstance(await ending(each), Finished)
        assert_books_balance(engine)


async def test_only_a_max_tokens_that_was_named_is_refused(autojump_clock: MockClock) -> None:
    """Of 512 tokens of context a prompt of 500 leaves 12."""
    async with open_virtual_engine(config(max_batch_total_tokens=512)) as (engine, _):
        assert engine.info.max_model_len == 512
        for prompt, resumed, expected in [("x" * 500, (), 12), ("abcd", (), 256), ("x" * 500, (65,) * 4, 12)]:
            stream = await engine.submit(request(None, prompt, resume_token_ids=resumed))
            end = await ending(stream)
            assert isinstance(end, Finished)
            assert (end.finish_reason, end.usage.completion_tokens) == ("length", expected)
        with pytest.raises(NeverFits, match="prompt of 500 tokens plus max_tokens 256 is 756: at most 512 fit"):
            await engine.submit(request(256, "x" * 500))
        with pytest.raises(NeverFits, match="prompt of 512 tokens plus max_tokens 1 is 513: at most 512 fit"):
            await engine.submit(request(None, "x" * 512))


async def crowd(engine: BatchEngine, waiting: int, **fields: Any) -> list[Stream]:
    """One long request that runs, and so many of the least urgent class that wait."""
    await engine.submit(request(400))
    await trio.sleep(0.05)
    return [await engine.submit(request(priority=9, **fields)) for _ in range(waiting)]


@pytest.mark.parametrize(
    "newcomer",
    [
        request(900_000, priority=0),
        request(None, "x" * 9000, priority=0),
        request(prompt="zebra", priority=0),
        request(prompt="added", priority=0),
        request(prompt="x" * 30, priority=0),  # too many tokens, whoever gives way
        request(priority=9),
    ],
)
async def test_nobody_gives_way_for_a_request_that_is_refused(
    autojump_clock: MockClock, newcomer: GenerateRequest
) -> None:
    bounds = config(max_queue_requests=5, max_queue_tokens=30, queue_timeout_ms=600_000)
    async with open_virtual_engine(bounds, codec=Fragile()) as (engine, _):
        waiting = await crowd(engine, 4)
        urgent = await engine.submit(request(priority=0))
        for _ in range(7):
            with pytest.raises(RequestError):
                await engine.submit(newcomer)
        assert engine.status().waiting == 5
        assert_books_balance(engine)
        for stream in (*waiting, urgent):
            assert isinstance(await ending(stream), Finished)


async def test_so_many_give_way_as_have_to_and_no_more(autojump_clock: MockClock) -> None:
    async with open_virtual_engine(config(max_queue_requests=9, max_queue_tokens=20)) as (engine, _):
        waiting = await crowd(engine, 5)
        await engine.submit(request(prompt="x" * 10, priority=0))
        assert [stream.live for stream in waiting] == [True, True, False, False, False]
        assert_books_balance(engine)


async def test_a_burst_of_urgent_requests_sheds_one_for_each_let_in(autojump_clock: MockClock) -> None:
    """While they are tokenized nobody has given way yet, and still no more are let in than the bound allows."""
    async with open_virtual_engine(config(max_queue_requests=4)) as (engine, _):
        waiting = await crowd(engine, 4)
        refused = 0

        async def ask() -> None:
            nonlocal refused
            try:
                await engine.submit(request(prompt="x" * 5000, priority=0))
            except QueueFull:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(7):
                nursery.start_soon(ask)
        assert refused == 3
        assert not any(stream.live for stream in waiting)
        assert engine.status().waiting == 4
        assert_books_balance(engine)


def test_a_full_queue_lends_no_more_places_than_others_may_give_up() -> None:
    admission = Admission(max_requests=1, max_tokens=100)
    admission.reserve()
    lent = admission.reserve(sheddable=1)
    for _ in range(2):
        with pytest.raises(QueueFull):
            admission.reserve(sheddable=1)
    lent.leave()
    admission.reserve(sheddable=1)
    assert (admission.requests, admission.lent) == (1, 1)


def unhashable(engine: BatchEngine, chosen: GenerateRequest) -> Any:
    return engine.submit(chosen, client=[])  # type: ignore[arg-type]


Act = tuple[Callable[[BatchEngine, GenerateRequest], Any], GenerateRequest]
acts = st.one_of(
    st.builds(
        lambda tokens, length, priority: (BatchEngine.submit, request(tokens, "x" * length, priority=priority)),
        st.sampled_from([1, 30, None, 900_000]),
        st.sampled_from([1, 9, 40, 3000]),
        st.sampled_from([0, 5, 9]),
    ),
    st.sampled_from(["zebra", "panic", "added", ""]).map(lambda prompt: (BatchEngine.submit, request(prompt=prompt))),
    st.sampled_from(SAMPLING).map(
        lambda bad: (BatchEngine.submit, GenerateRequest(prompt="a", sampling=SamplingParams(**dict([bad]))))
    ),
    st.sampled_from(REQUEST).map(lambda bad: (BatchEngine.submit, replace(request(), **dict([bad])))),
    st.just((BatchEngine.submit, request(resume_token_ids=(65,) * 9))),
    st.just((unhashable, request())),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(acts, st.sampled_from([None, 0.0, 0.001, 0.2]), st.sampled_from([0.0, 0.02, 1.0])), max_size=25),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 9),
)
def test_no_sequence_of_submissions_loses_a_place(
    sequence: list[tuple[Act, float | None, float]], bound: int, seed: int
) -> None:
    """Good, bad, raising ones, some of them cancelled (perhaps while they are tokenized), one by one or at once."""

    async def run() -> None:
        bounds = config(max_queue_requests=2 + bound, max_queue_tokens=50)
        async with open_virtual_engine(bounds, codec=Fragile()) as (engine, _):

            async def act(submit: Callable[..., Any], chosen: GenerateRequest, patience_s: float | None) -> None:
                with trio.move_on_after(patience_s if patience_s is not None else 1e9):
                    try:
                        stream = await submit(engine, chosen)
                    except (RequestError, TypeError):
                        return
                    try:
                        await ending(stream)
                    finally:
                        stream.cancel()

            async with trio.open_nursery() as nursery:
                for (submit, chosen), patience_s, pause_s in sequence:
                    nursery.start_soon(act, submit, chosen, patience_s)
                    if pause_s or source.random() < 0.5:
                        await trio.sleep(pause_s)
                        await trio.testing.wait_all_tasks_blocked()
                        assert_books_balance(engine)
            assert_books_balance(engine)
            assert engine.status().waiting == engine.status().running == 0
            assert isinstance(await ending(await engine.submit(request())), Finished)

    source = random.Random(seed)
    trio.run(run, clock=MockClock(autojump_threshold=0))


async def test_the_queue_timeout_counts_while_a_prompt_is_tokenized(autojump_clock: MockClock) -> None:
    """The tokenizer is busy with other texts for longer than the request may wait; nothing of it stays behind."""
    async with open_virtual_engine(config(queue_timeout_ms=10_000)) as (engine, worker):

        async def busy(request: GenerateRequest, client: Client) -> list[int]:
            await trio.sleep(60)
            return [1]

        engine._tokenize = busy  # type: ignore[assignment]
        for fields, after_s in (({"timeout_ms": 2000}, 2.0), ({"queue_timeout_ms": 500}, 0.5), ({}, 10.0)):
            began_s = trio.current_time()
            with pytest.raises(QueueTimeout, match="tokenized"):
                await engine.submit(GenerateRequest(prompt="a", **fields))  # type: ignore[arg-type]
            assert trio.current_time() - began_s == pytest.approx(after_s)
        assert_books_balance(engine)
        assert worker.keys_seen == []
