"""What a long prompt does to the streams beside it, against the size of the chunks in which it is prefilled."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import NoReturn

import trio

from lab_tools.script import run_script, script_parser
from wsbatch.batching.costs import CostModel
from wsbatch.cli.parsing import BAD_USAGE, ending_with
from wsbatch.config import EngineConfig
from wsbatch.engine.loop import BatchEngine
from wsbatch.engine.open import open_engine
from wsbatch.messages import GenerateRequest, SamplingParams, Tokens
from wsbatch.testing import open_virtual_engine
from wsbatch_bench.cli.flags import add_model_flags, add_sampling, engine_config, read_costs, read_sampling, sizes
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.quantiles import observed_quantile
from wsbatch_bench.sampling import GREEDY, seeded, shown
from wsbatch_bench.sweep.stage import run_virtual

_SETTLED_TOKENS = 16  # of every stream before the newcomer comes
_AFTER_TOKENS = 8  # of the newcomer before the measurement ends

MakePrompt = Callable[[int, int], tuple[int, ...]]

_DESCRIPTION = """\
Let streams decode in continuous batching, add a request with a long prompt, and measure, for each
size of prefill chunk, greedy and sampled: the longest gap between a stream's tokens, the newcomer's time to first
token, and the streams' tokens a second meanwhile. A chunk as long as the prompt is no chunking.
"""

_EPILOG = """\
examples:
  python bench/lab/stall.py --model demo
  python bench/lab/stall.py --model simulated --chunks 64,256,1024,4096
"""


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
    costs: CostModel,
    sampling: SamplingParams = GREEDY,
) -> StallPoint:
    """Let `streams` requests decode, add one with a prompt of `newcomer_tokens`, and watch the others' tokens.

    The simulated model runs in virtual time. Raises what loading the model raises.
    """

    async def watch(engine: BatchEngine) -> StallPoint:
        watcher = _Watcher(
            engine, streams=streams, prompt_tokens=prompt_tokens, make_prompt=make_prompt, sampling=sampling
        )
        return await watcher.run(newcomer_tokens, config.prefill_chunk_tokens)

    async def virtual() -> StallPoint:
        async with open_virtual_engine(config, costs) as (engine, _):
            return await watch(engine)

    async def real() -> StallPoint:
        async with open_engine(config) as engine:
            return await watch(engine)

    return run_virtual(virtual) if config.model == "simulated" else trio.run(real)


class _Watcher:
    def __init__(
        self,
        engine: BatchEngine,
        *,
        streams: int,
        prompt_tokens: int,
        make_prompt: MakePrompt,
        sampling: SamplingParams,
    ) -> None:
        self._sampling = sampling
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
        sampling = replace(seeded(self._sampling, index), max_tokens=min(most, room, 512), ignore_eos=True)
        return GenerateRequest(id=index, token_ids=self._make_prompt(index, prompt_tokens), sampling=sampling)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    parser = script_parser("stall", description=_DESCRIPTION, epilog=_EPILOG)
    add_model_flags(parser, scheduler=None)
    parser.add_argument("--chunks", type=sizes, default=(64, 128, 256, 512, 1024, 4096), metavar="N,N", help="tokens "
                        "(default: 64,128,256,512,1024,4096)")  # fmt: skip
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="of the streams (default: 64)")
    parser.add_argument("--newcomer-tokens", type=int, default=4000, metavar="N", help="of its prompt (default: 4000)")
    add_sampling(parser, beside=True)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    run_script(parser, run, argv)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    points: dict[str, list[StallPoint]] = {}
    sampling = read_sampling(arguments)
    print(f"{'chunk':>6} {'gap before':>11} {'longest gap':>12} {'newcomer TTFT':>14} {'tokens/s beside it':>19}")
    with ending_with(BAD_USAGE, ValueError, OSError):
        costs = read_costs(arguments)["continuous"]
        for chunk, choice in product(arguments.chunks, dict.fromkeys((GREEDY, sampling))):
            config = engine_config(
                arguments,
                scheduler="continuous",
                max_batch_size=arguments.streams + 1,
                prefill_chunk_tokens=chunk,
                max_batch_prefill_tokens=max(chunk, 2048),
            )
            point = measure_stall(
                config,
                streams=arguments.streams,
                prompt_tokens=arguments.prompt_tokens,
                newcomer_tokens=arguments.newcomer_tokens,
                make_prompt=draw_trace(1).prompt_ids,
                costs=costs,
                sampling=choice,
            )
            points.setdefault(shown(choice), []).append(point)
            print(
                f"{chunk:6} {1000 * point.gap_before_s:8.1f} ms {1000 * point.longest_gap_s:9.1f} ms "
                f"{point.newcomer_ttft_s:12.2f} s {point.tokens_per_s:19.1f}  {shown(choice)}",
                flush=True,
            )
    if arguments.out is not None:
        arguments.out.write_text(
            json.dumps({name: [*map(asdict, each)] for name, each in points.items()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    main()
