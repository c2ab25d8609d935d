"""A row whose numbers become NaN or infinite ends alone: all others say what they say by themselves."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.batching.queue import ScheduledRequest
from wsbatch.batching.scheduler import Step
from wsbatch.messages import SamplingParams
from wsbatch.model.compiled import KernelsUnavailable, load_library
from wsbatch.model.levels import choose
from wsbatch.model.loading import LoadedModel
from wsbatch.model.padded import PaddedModel
from wsbatch.model.paged import PagedModel
from wsbatch.model.probe import Probe
from wsbatch.steps import ModelInfo, PaddedDecode, PaddedRow, PaddedStart, PagedRow, PagedStep

VOCAB, BLOCK, BLOCKS, NEW, POSITIONS = 97, 16, 8, 5, 64
NAN, INFINITE = 95, 96  # tokens whose embeddings are no numbers
GREEDY = SamplingParams()
RUNNERS = [("fused", torch.float32), ("fused", torch.bfloat16), ("modules", torch.float32)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """On one thread no row is split, so the fused runner's numbers are the same bits in any company."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poisoned(dtype: torch.dtype, *, sound: bool = False) -> LoadedModel:
    """A tiny random Llama. Its two poisoned tokens are never said; `sound` leaves their embeddings as they are."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.3}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.LlamaConfig(**shape, **ends, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model = model.requires_grad_(False).to(dtype)
    model.lm_head.weight[[NAN, INFINITE]] = 0
    if not sound:
        poison(model)
    info = ModelInfo("tiny", "r", str(dtype), "cpu", POSITIONS, VOCAB, frozenset())
    return LoadedModel(model, Path(), info)


def poison(model: Any) -> None:
    model.model.embed_tokens.weight[NAN] = math.nan
    model.model.embed_tokens.weight[INFINITE, 3] = math.inf


def skip_without_kernels(dtype: torch.dtype) -> None:
    try:
        load_library(dtype, choose("auto"))
    except KernelsUnavailable as error:
        pytest.skip(f"no compiled kernels here: {error}")


def paged(runner: str, dtype: torch.dtype) -> PagedModel:
    if runner == "fused":
        skip_without_kernels(dtype)
    loaded = poisoned(dtype, sound=True)
    model = PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK, runner=runner)  # type: ignore[arg-type]
    poison(loaded.model)  # the check at load needs sound weights; both runners read embeddings where they are
    return model


def serve(model: PagedModel, prompts: Sequence[tuple[int, ...]], chunk: int, prefix_cache: bool) -> list[list[int]]:
    """What each prompt is answered, all of them at once; `[-1]` where its row failed."""
    scheduler = ContinuousScheduler(
        max_batch_size=4,
        max_batch_prefill_tokens=chunk,
        prefill_chunk_tokens=chunk,
        pool=BlockPool(BLOCKS, BLOCK, prefix_cache=prefix_cache),
    )
    for key, prompt in enumerate(prompts):
        scheduler.add(
            ScheduledRequest(
                key=key, token_ids=prompt, max_new_tokens=NEW, sampling=GREEDY, priority=5, arrived_s=float(key)
            )
        )
    said: list[list[int]] = [[] for _ in prompts]
    now_s = 0.0
    while isinstance(step := scheduler.decide(now_s), Step):
        now_s += 1
        assert isinstance(step.plan, PagedStep)
        result = model.run(step.plan)
        for key in result.failed:  # as the engine does
            scheduler.end(key, now_s)
            said[key] = [-1]
        for token in scheduler.complete(result, now_s).tokens:
            said[token.key].append(token.token_id)
            if len(said[token.key]) == NEW:
                scheduler.end(token.key, now_s)
        scheduler.check()
    return said


sound_prompts = st.lists(st.integers(0, NAN - 1), min_size=1, max_size=40).map(tuple)


@st.composite
def prompts_of_both_kinds(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Some with a poisoned token anywhere; some begin like others, so that the prefix cache is asked."""
    made: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(2, 5))):
        prompt = draw(sound_prompts)
        if made and draw(st.booleans()):
            prompt = (*draw(st.sampled_from(made))[: draw(st.integers(1, 40))], *prompt)[:45]
        if draw(st.booleans()):
            at = draw(st.integers(0, len(prompt) - 1))
            prompt = (*prompt[:at], draw(st.sampled_from([NAN, INFINITE])), *prompt[at + 1 :])
        made.append(prompt)
    return made


def is_sound(prompt: Sequence[int]) -> bool:
    return NAN not in prompt and INFINITE not in prompt


@pytest.mark.parametrize(("runner", "dtype"), RUNNERS, ids=str)
def test_rows_in_the_company_and_the_blocks_of_failed_ones(runner: str, dtype: torch.dtype) -> None:
    model, untouched = paged(runner, dtype), paged(runner, dtype)

    @settings(max_examples=12, deadline=None)
    @given(prompts=prompts_of_both_kinds(), chunk=st.sampled_from([5, 16, 64]), prefix_cache=st.booleans())
    def trial(prompts: list[tuple[int, ...]], chunk: int, prefix_cache: bool) -> None:
        alone = [serve(untouched, [text], 64, False)[0] if is_sound(text) else [-1] for text in prompts]
        assert serve(model, prompts, chunk, prefix_cache) == alone

    trial()


@pytest.mark.parametrize(("runner", "dtype"), RUNNERS, ids=str)
def test_the_blocks_of_a_failed_row_are_as_good_as_new(runner: str, dtype: torch.dtype) -> None:
    model = paged(runner, dtype)
    clean = PagedRow(1, (4, 5, 6), 0, (0,), GREEDY)
    longer = PagedRow(2, tuple(range(20)), 0, (1, 2), GREEDY)
    decodes = PagedStep((PagedRow(1, (7,), 3, (0,), GREEDY), PagedRow(2, (7,), 20, (1, 2), GREEDY)))
    plans = [PagedStep((clean,)), PagedStep((longer,)), decodes]
    before = [model.run(plan) for plan in plans]
    for block in range(3):
        filled = PagedRow(0, (NAN, *range(15)), 0, (block,), None)
        assert list(model.run(PagedStep((filled,))).failed) == [0]
    after = [model.run(plan) for plan in plans]
    assert [(r.token_ids, r.failed) for r in after] == [(r.token_ids, {}) for r in before]


@pytest.mark.parametrize(("runner", "dtype"), RUNNERS, ids=str)
def test_a_chunk_that_does_not_sample_is_looked_at_too(runner: str, dtype: torch.dtype) -> None:
    model = paged(runner, dtype)
    rows = (
        PagedRow(7, (3, NAN, 5), 0, (0,), None),
        PagedRow(8, (3, 4, 5), 0, (1,), None),
        PagedRow(9, (3, INFINITE), 0, (2,), GREEDY),
        PagedRow(6, (3,), 0, (3,), SamplingParams(temperature=1.0, logprobs=2)),
    )
    result = model.run(PagedStep(rows))
    assert set(result.failed) == {7, 9}
    assert len(result.token_ids) == 2
    assert result.logprobs is not None
    assert [found is None for found in result.logprobs] == [True, False]


def padded(model: PaddedModel, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    rows = tuple(PaddedRow(key, prompt, GREEDY) for key, prompt in enumerate(prompts))
    results = [model.run(PaddedStart(rows, NEW)), *(model.run(PaddedDecode()) for _ in range(NEW - 1))]
    failed = {key for result in results for key in result.failed}
    said = zip(*(result.token_ids for result in results), strict=True)
    return [[-1] if key in failed else list(tokens) for key, tokens in enumerate(said)]


def test_rows_in_a_padded_batch_with_failed_ones() -> None:
    model = PaddedModel(poisoned(torch.float32))

    @settings(max_examples=12, deadline=None)
    @given(prompts=prompts_of_both_kinds())
    def trial(prompts: list[tuple[int, ...]]) -> None:
        alone = [padded(model, [text])[0] if is_sound(text) else [-1] for text in prompts]
        assert padded(model, prompts) == alone

    trial()


def test_no_row_is_padded_with_a_poisoned_token() -> None:
    loaded = poisoned(torch.float32)
    model, prompts = PaddedModel(loaded), [(4, 5), (1, 2, 3, 6, 7)]
    alone = [padded(model, [text])[0] for text in prompts]
    loaded.model.model.embed_tokens.weight[0] = math.nan
    assert padded(model, prompts) == alone


def opposite_keys(model: Any) -> None:
    """Keys are finite, and the scores of equal tokens near each other are all -inf."""
    attention = model.model.layers[0].self_attn
    query = attention.q_proj.weight.view(2, 2, 16, 64)  # [Hkv, group, D, hidden]
    query[:, 1] = query[:, 0]
    attention.k_proj.weight.copy_(query[:, 0].reshape(32, 64) * -3e37)


FAULTS = {
    "one row of the head is NaN": lambda model: model.lm_head.weight[40].fill_(math.nan),
    "the first layer's keys are NaN": lambda model: model.model.layers[0].self_attn.k_proj.weight.fill_(math.nan),
    "the first layer's keys overflow": lambda model: model.model.layers[0].self_attn.k_proj.weight.mul_(3e38),
    "the last layer's values are infinite": lambda model: model.model.layers[1].self_attn.v_proj.weight.fill_(math.inf),
}

# Keys are finite. torch's SDPA, which the modules runner uses, takes such rows for masked ones and answers 0.
FAULTS_OF_SCORES = {
    "the first layer's scores are all -inf": opposite_keys,
    "the first layer's scores overflow": lambda model: model.model.layers[0].self_attn.k_proj.weight.mul_(1e37),
}
FAULTY = [(fault, *runner) for runner in RUNNERS for fault in FAULTS]
FAULTY += [(fault, *runner) for runner in RUNNERS for fault in FAULTS_OF_SCORES if runner[0] == "fused"]


@pytest.mark.parametrize(("fault", "runner", "dtype"), FAULTY, ids=str)
def test_nothing_that_is_not_finite_is_swallowed(
    fault: str, runner: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = poisoned(dtype, sound=True)
    (FAULTS | FAULTS_OF_SCORES)[fault](loaded.model)
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert not loaded.model(torch.tensor([[1, 1, 1]])).logits[0, -1].isfinite().all()
    if runner == "fused":
        skip_without_kernels(dtype)
    monkeypatch.setattr(Probe, "differs", lambda *_, **__: None)  # it would refuse such weights at load
    model = PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK, runner=runner)  # type: ignore[arg-type]
    prefill = PagedRow(0, (1, 1, 1), 0, (0,), GREEDY)
    decode = PagedRow(0, (1,), 3, (0,), GREEDY)
    assert set(model.run(PagedStep((prefill,))).failed) == {0}
    assert set(model.run(PagedStep((decode,))).failed) == {0}
