"""The fused runner under the scheduler: tokens and log probabilities are the same bits alone and in company.

At every level that this machine has, in float32 and bfloat16, greedy and sampled: whoever shares the steps, however
prompts are cut, whether blocks come from the prefix cache, after a preemption, and on another number of threads. Log
probabilities are compared too, because they show every change of a logit, and a token only one at a near tie.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Step
from wsbatch.messages import SamplingParams, TokenLogprobs
from wsbatch.model.levels import LEVELS
from wsbatch.model.loading import LoadedModel
from wsbatch.model.paged import PagedModel
from wsbatch.steps import ModelInfo

NEW, BLOCK = 40, 16
TOTAL_BLOCKS = 48  # one request of the longest kind and a short one: longer ones preempt each other
POSITIONS = TOTAL_BLOCKS * BLOCK
VOCAB = 211
LENGTHS = (5, 60, 257, 300, 610)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Output = list[tuple[int, TokenLogprobs | None]]


def prompts() -> list[tuple[int, ...]]:
    """Two of each length; the second ones have a common beginning."""
    source = random.Random(4)
    common = [source.randrange(VOCAB) for _ in range(280)]
    made = []
    for length in LENGTHS:
        made.append(tuple(source.randrange(VOCAB) for _ in range(length)))
        made.append(tuple((common + [source.randrange(VOCAB) for _ in range(length)])[:length]))
    return made


PROMPTS = prompts()


def sampling(prompt: int, sampled: bool) -> SamplingParams:
    if not sampled:
        return SamplingParams(logprobs=2)
    return SamplingParams(temperature=0.9, top_p=0.95, seed=prompt, logprobs=2)


def paged(dtype: str, level: str, threads: int) -> PagedModel:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = transformers.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=POSITIONS,
            initializer_range=0.2,
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DTYPES[dtype]).requires_grad_(False)
    info = ModelInfo("tiny", "1", dtype, "cpu", POSITIONS, VOCAB, frozenset())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        return PagedModel(
            LoadedModel(model, Path(), info), total_blocks=TOTAL_BLOCKS, block_tokens=BLOCK, runner="fused",
            kernel_level=level,
        )  # fmt: skip


def serve(
    model: PagedModel, arrivals: list[tuple[int, int, bool]], *, chunk: int, prefix_cache: bool
) -> tuple[list[Output], int]:
    """The output of requests (prompt, step of arrival, sampled) that share a scheduler; how many were preempted."""
    scheduler = ContinuousScheduler(
        max_batch_size=6,
        max_batch_prefill_tokens=max(chunk, 100),
        prefill_chunk_tokens=chunk,
        pool=BlockPool(TOTAL_BLOCKS, BLOCK, prefix_cache=prefix_cache),
    )
    todo = sorted(enumerate(arrivals), key=lambda item: item[1][1])
    output: list[Output] = [[] for _ in arrivals]
    now = 0
    while todo or scheduler.running or scheduler.queue:
        while todo and todo[0][1][1] <= now:
            key, (prompt, _, sampled) = todo.pop(0)
            scheduler.add(
                ScheduledRequest(
                    key=key,
                    token_ids=PROMPTS[prompt],
                    max_new_tokens=NEW,
                    sampling=sampling(prompt, sampled),
                    priority=5,
                    arrived_s=float(now),
                )
            )
        step = scheduler.decide(float(now))
        now += 1
        if not isinstance(step, Step):
            continue
        for token in scheduler.complete(model.run(step.plan), float(now)).tokens:
            output[token.key].append((token.token_id, token.logprobs))
            if len(output[token.key]) == NEW:
                scheduler.end(token.key, float(now))
    return output, scheduler.preemptions


@pytest.fixture(scope="module")
def cases() -> Callable[[str, str], tuple[PagedModel, dict[tuple[int, bool], Output]]]:
    """For a dtype and a level: a model on two threads, and what one on a single thread says to each request alone."""
    made: dict[tuple[str, str], Any] = {}

    def case(dtype: str, level: str) -> Any:
        if (dtype, level) not in made:
            single, alone = paged(dtype, level, 1), {}
            for request in ((prompt, sampled) for prompt in range(len(PROMPTS)) for sampled in (False, True)):
                prompt, sampled = request
                (alone[request],), _ = serve(single, [(prompt, 0, sampled)], chunk=POSITIONS, prefix_cache=False)
            made[dtype, level] = paged(dtype, level, 2), alone
        return made[dtype, level]

    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [level.name for level in LEVELS])
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 12), st.booleans()), min_size=2, max_size=7
    ),
    chunk=st.sampled_from([7, BLOCK, 100, 333]),
    prefix_cache=st.booleans(),
)
def test_company_changes_no_bit(
    level: str,
    dtype: str,
    cases: Callable[[str, str], Any],
    arrivals: list[tuple[int, int, bool]],
    chunk: int,
    prefix_cache: bool,
) -> None:
    reason = next(known for known in LEVELS if known.name == level).missing()
    if reason is not None:
        pytest.skip(f"no level {level} here: {reason}")
    model, alone = cases(dtype, level)
    output, _ = serve(model, arrivals, chunk=chunk, prefix_cache=prefix_cache)
    assert output == [alone[prompt, sampled] for prompt, _, sampled in arrivals]


def test_these_traces_preempt(cases: Callable[[str, str], Any]) -> None:
    model, alone = cases("float32", "generic")
    arrivals = [(prompt, 0, prompt % 2 > 0) for prompt in (6, 7, 2, 3, 0, 1)]
    output, preempted = serve(model, arrivals, chunk=333, prefix_cache=False)
    assert preempted
    assert output == [alone[prompt, sampled] for prompt, _, sampled in arrivals]
