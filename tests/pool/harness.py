"""For the tests of pools: a cluster of virtual replicas, what a request gives when it is undisturbed, and readers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
import trio

from virtual_replica import VirtualReplica
from wsbatch.batching.costs import CostModel
from wsbatch.config import EngineConfig
from wsbatch.engine.stream import Stream
from wsbatch.messages import Failed, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.model.simulated import DEFAULT_COSTS, SimulatedModel
from wsbatch.pool import EnginePool, PoolConfig, open_pool
from wsbatch.steps import PaddedDecode, PaddedRow, PaddedStart

POISON = "\x01"
# The step costs of the default: 10 ms, 1 ms a decode row, 0.5 ms a prompt token.
ENGINE = EngineConfig(model="simulated", scheduler="continuous", max_batch_size=4, max_batch_total_tokens=8192)


class Cluster:
    """Replicas named a, b, c …, and a pool over them."""

    def __init__(self, replicas: list[VirtualReplica], nursery: trio.Nursery) -> None:
        self.names = {chr(97 + index): replica for index, replica in enumerate(replicas)}
        self.nursery = nursery
        self.pool: EnginePool

    def __getitem__(self, name: str) -> VirtualReplica:
        return self.names[name]

    async def start(self, name: str) -> None:
        await self.nursery.start(self.names[name].run)

    def where(self) -> dict[str, int]:
        """Live requests on each replica, as the pool knows it."""
        return {name: self.pool.replicas[name].live for name in sorted(self.pool.replicas)}

    async def all_ready(self) -> None:
        while any(replica.state != "ready" for replica in self.pool.replicas.values()):  # noqa: ASYNC110
            await trio.sleep(0.01)
        await trio.sleep(0.05)  # the other connections


@asynccontextmanager
async def cluster(
    count: int = 2, *, engine: EngineConfig = ENGINE, costs: CostModel = DEFAULT_COSTS, **settings: Any
) -> AsyncIterator[Cluster]:
    async with trio.open_nursery() as nursery:
        group = Cluster([VirtualReplica(engine, costs=costs) for _ in range(count)], nursery)
        for name in group.names:
            await group.start(name)
        dials = {name: replica.dial for name, replica in group.names.items()}
        async with open_pool(dials, PoolConfig(**{"connections": 2} | settings)) as group.pool:
            await group.all_ready()
            yield group
            assert group.pool._routes == {}
            assert group.pool._waiting == {}
            assert len(group.pool._deadlines) == 0
            assert sum(group.where().values()) == 0
        nursery.cancel_scope.cancel()


def request(tokens: int = 40, prompt: str = "abcd", **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=tokens)
    return GenerateRequest(prompt=prompt, sampling=sampling, **fields)


@cache
def undisturbed(request: GenerateRequest) -> tuple[tuple[int, ...], str, str]:
    """What the request gets from the model when nothing else exists: ids, text, finish reason."""
    model, sampling = SimulatedModel(), request.sampling
    done = request.resume_token_ids
    row_sampling = SamplingParams(temperature=sampling.temperature, seed=sampling.seed or 0)
    row = PaddedRow(0, (*(request.prompt or "").encode(), *done), row_sampling)
    ids = [*done, *model.compute(PaddedStart((row,), sampling.max_tokens)).token_ids]
    while len(ids) < sampling.max_tokens and not any(stop in bytes(ids).decode() for stop in sampling.stop):
        ids += model.compute(PaddedDecode()).token_ids
    text = bytes(ids).decode()
    found = [text.index(stop) for stop in sampling.stop if stop in text]
    reason = "stop" if found else "length"
    return tuple(ids), text[len(done) : min(found, default=len(text))], reason


class Reader:
    """Reads one stream to its end, and checks on the way that nothing is missing, repeated or taken back."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.ids = list(stream.request.resume_token_ids)
        self.text = ""
        self.logprobs = 0
        self.end: Finished | Failed | None = None
        self.ended_s = 0.0

    async def read(self) -> "Reader":
        async for event in self.stream:
            assert self.end is None
            match event:
                case Tokens():
                    assert event.index == len(self.ids)
                    self.ids += event.token_ids
                    self.text += event.text
                    self.logprobs += len(event.logprobs or ())
                case Finished():
                    self.end = event
                    self.text += event.text
                case Failed():
                    self.end = event
        self.ended_s = trio.current_time()
        return self

    def check_undisturbed(self) -> None:
        """All of the output, exactly as if it had been alone in the world, and a true report."""
        request = self.stream.request
        ids, text, reason = undisturbed(request)
        assert isinstance(self.end, Finished), self.end
        assert (self.end.finish_reason, self.text) == (reason, text)
        assert self.end.usage.completion_tokens == len(ids)
        assert self.end.usage.prompt_tokens == len((request.prompt or "").encode())
        assert tuple(self.end.token_ids if self.end.token_ids is not None else self.ids) == ids
        timing = self.end.timing
        assert timing.queue_ms + timing.prefill_ms == pytest.approx(timing.ttft_ms, abs=0.01)
        assert timing.ttft_ms <= timing.total_ms


async def submit(pool: EnginePool, asked: GenerateRequest) -> Reader:
    return Reader(await pool.submit(asked))


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(3600):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.001)
