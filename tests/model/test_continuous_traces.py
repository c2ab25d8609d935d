"""Scheduler and model together: whoever joins, leaves, shares or is preempted, greedy tokens are generate's."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Step
from wsbatch.messages import SamplingParams
from wsbatch.model.loading import LoadedModel
from wsbatch.model.paged import PagedModel

NEW = 12
BLOCK = 16
TOTAL_BLOCKS = 10  # three requests of the longest kind fit, no more: the others preempt
LENGTHS = (1, 3, 15, 16, 17, 31, 33, 40)

Load = Callable[[str], LoadedModel]


def prompts(vocab: int) -> list[tuple[int, ...]]:
    """Two of each length, half of them with a common beginning of two blocks (or their own length)."""
    source = random.Random(4)
    common = [source.randrange(vocab) for _ in range(32)]
    made = []
    for length in LENGTHS:
        made.append(tuple(source.randrange(vocab) for _ in range(length)))
        made.append(tuple((common + [source.randrange(vocab) for _ in range(40)])[:length]))
    return made


@pytest.fixture(scope="module")
def cases(tiny: Load) -> Callable[[str], tuple[PagedModel, list[tuple[int, ...]], list[list[int]]]]:
    """For a family: a paged model, the prompts, and what `transformers.generate` says to each alone."""
    made: dict[str, Any] = {}

    def case(family: str) -> Any:
        if family not in made:
            loaded = tiny(family)
            texts = prompts(loaded.info.vocab_size)
            answers = []
            with torch.inference_mode():
                for prompt in texts:
                    ids = torch.tensor([prompt])
                    output = loaded.model.generate(
                        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
                    )
                    answers.append(output[0, len(prompt) :].tolist())
            own = LoadedModel(copy.deepcopy(loaded.model), loaded.directory, loaded.info)
            made[family] = PagedModel(own, total_blocks=TOTAL_BLOCKS, block_tokens=BLOCK), texts, answers
        return made[family]

    return case


requests = st.tuples(st.integers(0, 2 * len(LENGTHS) - 1), st.integers(0, 30), st.integers(1, NEW), st.booleans())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(requests, min_size=1, max_size=10),
    chunk=st.sampled_from([1, 7, BLOCK, 64]),
    prefix_cache=st.booleans(),
    cancels=st.sets(st.integers(0, 9), max_size=2),
)
def test_random_traces_give_the_tokens_of_each_alone(
    family: str,
    cases: Callable[[str], Any],
    arrivals: list[tuple[int, int, int, bool]],
    chunk: int,
    prefix_cache: bool,
    cancels: set[int],
) -> None:
    model, texts, answers = cases(family)
    scheduler = ContinuousScheduler(
        max_batch_size=6,
        max_batch_prefill_tokens=max(chunk, 32),
        prefill_chunk_tokens=chunk,
        pool=BlockPool(TOTAL_BLOCKS, BLOCK, prefix_cache=prefix_cache),
    )
    todo = sorted(enumerate(arrivals), key=lambda item: item[1][1])
    output: dict[int, list[int]] = {}
    logprobs = 0
    now, step = 0, None
    while todo or scheduler.running or scheduler.queue:
        while todo and todo[0][1][1] <= now:
            key, (text, _, new, wants_logprobs) = todo.pop(0)
            output[key] = []
            scheduler.add(
                ScheduledRequest(
                    key=key,
                    token_ids=texts[text],
                    max_new_tokens=new,
                    sampling=SamplingParams(logprobs=2 if wants_logprobs else None),
                    priority=5,
                    arrived_s=float(now),
                )
            )
        step = scheduler.decide(float(now))
        now += 1
        if not isinstance(step, Step):
            continue
        if now % 7 == 0:  # while the step is in flight
            for key in cancels & {row.key for row in step.plan.rows}:  # type: ignore[union-attr]
                scheduler.end(key, float(now))
        for token in scheduler.complete(model.run(step.plan), float(now)).tokens:
            output[token.key].append(token.token_id)
            wanted = arrivals[token.key][3]
            assert (token.logprobs is not None) is wanted
            logprobs += wanted
            if len(output[token.key]) == arrivals[token.key][2]:
                scheduler.end(token.key, float(now))
        scheduler.check()
    for key, (text, _, new, _) in enumerate(arrivals):
        assert output[key] == answers[text][: len(output[key])]
        assert len(output[key]) == new or key in cancels
    pool = scheduler.pool
    assert pool.used == 0
    assert pool.free + pool.cached == pool.total
