"""What a long prompt does to the streams beside it, against the size of the chunks in which it is prefilled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import trio

from wsbatch.batch_engine import BatchEngine
from wsbatch.config import EngineConfig
from wsbatch.messages import GenerateRequest, SamplingParams, Tokens
from wsbatch.model.simulated import StepCosts
from wsbatch.opening import open_engine
from wsbatch.testing.worker import open_virtual_engine
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.virtual import run_virtual

_SETTLED_TOKENS = 16  # of every stream before the newcomer comes
_AFTER_TOKENS = 8  # of the newcomer before the measurement ends

MakePrompt = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StallPoint:
    """One chunk size; seconds.

    Attributes:
        gap_before_s: median time between a stream's tokens before the newcomer came.
        longest_gap_s: the longest time between two tokens of any stream until the newcomer had its first.
        newcomer_ttft_s: from its submission.
        tokens_per_s: of the streams, in that time.
    """

    chunk_tokens: int
    gap_before_s: float
    longest_gap_s: float
    newcomer_ttft_s: float
    tokens_per_s: float


def measure_stall(
    config: EngineConfig,
    *,
    streams: int,
    prompt_tokens: int,
    newcomer_tokens: int,
    make_prompt: MakePrompt,
    costs: StepCosts,
) -> StallPoint:
    """Let `streams` requests decode, add one with a prompt of `newcomer_tokens`, and watch the others' tokens.

    The simulated model runs in virtual time. Raises what loading the model raises.
    """

    async def watch(engine: BatchEngine) -> StallPoint:
        watcher = _Watcher(engine, streams=streams, prompt_tokens=prompt_tokens, make_prompt=make_prompt)
        return await watcher.run(newcomer_tokens, config.prefill_chunk_tokens)

    async def virtual() -> StallPoint:
        async with open_virtual_engine(config, costs) as (engine, _):
            return await watch(engine)

    async def real() -> StallPoint:
        async with open_engine(config) as engine:
            return await watch(engine)

    return run_virtual(virtual) if config.model == "simulated" else trio.run(real)


class _Watcher:
    def __init__(self, engine: BatchEngine, *, streams: int, prompt_tokens: int, make_prompt: MakePrompt) -> None:
        self._engine = engine
        self._make_prompt = make_prompt
        self._prompt_tokens = prompt_tokens
        self._times: list[list[float]] = [[] for _ in range(streams)]
        self._settled = trio.Event()

    async def run(self, newcomer_tokens: int, chunk_tokens: int) -> StallPoint:
        async with trio.open_nursery() as nursery:
            for index in range(len(self._times)):
                nursery.start_soon(self._stream, index)
            await self._settled.wait()
            came_s = trio.current_time()
            first_s = await self._newcomer(newcomer_tokens)
            nursery.cancel_scope.cancel()
        before = [gap for times in self._times for gap in _gaps([at_s for at_s in times if at_s <= came_s])]
        # From each stream's last token before the newcomer on: its wait began with that one.
        during = [
            gap
            for times in self._times
            for gap in _gaps([*[at_s for at_s in times if at_s <= came_s][-1:], *(t for t in times if came_s < t)])
        ]
        count = sum(came_s < at_s <= first_s for times in self._times for at_s in times)
        return StallPoint(
            chunk_tokens,
            observed_quantile(before, 0.5),
            max(during, default=first_s - came_s),
            first_s - came_s,
            count / (first_s - came_s),
        )

    async def _stream(self, index: int) -> None:
        times = self._times[index]
        async with self._engine.generate(self._request(index, self._prompt_tokens, 100_000)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    times += [trio.current_time()] * len(event.token_ids)
                    if all(len(each) >= _SETTLED_TOKENS for each in self._times):
                        self._settled.set()

    async def _newcomer(self, tokens: int) -> float:
        """When its first token came; returns a few tokens later."""
        times: list[float] = []
        async with self._engine.generate(self._request(len(self._times), tokens, _AFTER_TOKENS)) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    times += [trio.current_time()] * len(event.token_ids)
        return times[0]

    def _request(self, index: int, prompt_tokens: int, most: int) -> GenerateRequest:
        room = self._engine.info.max_model_len - prompt_tokens
        sampling = SamplingParams(max_tokens=min(most, room, 512), ignore_eos=True)
        return GenerateRequest(id=index, token_ids=self._make_prompt(index, prompt_tokens), sampling=sampling)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
