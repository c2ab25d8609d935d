"""The C++ step against transformers' own forward: shapes, long rows, splits, windows, threads, formats, levels.

Every level that this machine has is compiled and run. A test at a level that it lacks is skipped, and says why.
"""

import gc
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsbatch.messages import SamplingParams
from wsbatch.model.compiled import KernelsUnavailable, load_library
from wsbatch.model.fused import PARTS, FusedRunner
from wsbatch.model.levels import LEVELS, Level, choose
from wsbatch.model.ragged import flatten
from wsbatch.model.sampling import sample
from wsbatch.steps import PagedRow, PagedStep

VOCAB, POSITIONS = 211, 1024  # a vocabulary that is no multiple of 16
GREEDY = SamplingParams()


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kind = changes.pop("kind", transformers.Qwen3Config)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(kind(**{**shape, **ends, **changes})).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model.to(dtype).requires_grad_(False)


@pytest.fixture(params=[level.name for level in LEVELS])
def level(request: pytest.FixtureRequest) -> Level:
    wanted = next(level for level in LEVELS if level.name == request.param)
    if (reason := wanted.missing()) is not None:
        pytest.skip(f"no level {wanted.name} here: {reason}")
    return wanted


def runner(
    model: Any,
    level: Level | None = None,
    *,
    threads: int = 1,
    block_tokens: int = 16,
    total_blocks: int = 160,
) -> FusedRunner:
    try:
        return FusedRunner(
            model,
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            max_model_len=POSITIONS,
            threads=threads,
            level=level or choose("auto"),
        )
    except KernelsUnavailable as error:
        pytest.skip(f"no compiled kernels here: {error}")


def ids(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def fused_logits(made: FusedRunner, texts: list[tuple[int, ...]], chunks: list[int], block_tokens: int) -> torch.Tensor:
    """Prefill each text in its own chunk size, all rows together. Returns the logits of each last token, [rows, V]."""
    numbers = list(range(160 * 16 // block_tokens))
    random.Random(1).shuffle(numbers)
    free = iter(numbers)
    tables = [tuple(next(free) for _ in range(-(-len(text) // block_tokens))) for text in texts]
    done, found = [0] * len(texts), {}
    while len(found) < len(texts):
        rows, live = [], [i for i in range(len(texts)) if i not in found]
        for i in live:
            new = texts[i][done[i] : done[i] + chunks[i]]
            ends = done[i] + len(new) == len(texts[i])
            rows.append(PagedRow(i, new, done[i], tables[i], GREEDY if ends else None))
            done[i] += len(new)
        ending = [row.key for row in rows if row.sampling is not None]
        plan = flatten(PagedStep(tuple(rows)), block_tokens=block_tokens, total_blocks=len(numbers))
        best, logits, _ = made.run(plan, [True] * len(ending))
        assert best == logits.argmax(-1).tolist()
        found.update(zip(ending, logits, strict=True))
    return torch.stack([found[i] for i in range(len(texts))])


def own_logits(model: Any, texts: list[tuple[int, ...]]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([text])).logits[0, -1].float() for text in texts])


SHAPES = {
    "one kv head": {"num_key_value_heads": 1, "head_dim": 32},
    "no sharing of kv heads": {"num_key_value_heads": 4, "head_dim": 16},
    "head_dim 48": {"head_dim": 48},
    "head_dim 80": {"head_dim": 80},
    "head_dim 128": {"head_dim": 128},
    "nine to three": {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
    "biases everywhere": {"kind": transformers.LlamaConfig, "attention_bias": True, "mlp_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "scaled positions": {
        "kind": transformers.LlamaConfig,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "window in one layer": {
        "kind": transformers.Qwen2Config,
        "use_sliding_window": True,
        "sliding_window": 70,
        "max_window_layers": 1,
    },
    "window in every layer": {"kind": transformers.MistralConfig, "sliding_window": 100},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_model(shape: str, level: Level) -> None:
    model = build(**SHAPES[shape])
    texts = [ids(count, seed) for seed, count in enumerate((1, 17, 300))]
    expected = own_logits(model, texts)
    got = fused_logits(runner(model, level), texts, [1, 5, 64], 16)
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_rows_split_among_threads(threads: int, block_tokens: int, level: Level) -> None:
    model = build()
    texts = [ids(count, seed) for seed, count in enumerate((999, 40, 3, 610))]
    expected = own_logits(model, texts)
    made = runner(model, level, threads=threads, block_tokens=block_tokens, total_blocks=160 * 16 // block_tokens)
    got = fused_logits(made, texts, [333, 1, 1, 609], block_tokens)
    made.close()
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("threads", [2, 3])
def test_few_long_decodes_are_split_and_merged(threads: int, level: Level) -> None:
    model = build(head_dim=16)
    texts = [ids(count, seed) for seed, count in enumerate((1000, 700))]
    expected = own_logits(model, texts)
    made = runner(model, level, threads=threads)
    got = fused_logits(made, texts, [999, 699], 16)  # the last step is two rows of one token
    made.close()
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


def test_bfloat16_is_as_near_to_float32_as_the_model_in_bfloat16(level: Level) -> None:
    exact, model = build(), build(torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    texts = [ids(count, seed) for seed, count in enumerate((30, 200, 450))]
    truth = own_logits(exact, texts)
    got = fused_logits(runner(model, level, threads=2), texts, [7, 64, 449], 16)
    error, usual = (got - truth).abs().mean(), (own_logits(model, texts) - truth).abs().mean()
    assert 0 < error < 1.5 * usual


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 13, 33])
def test_any_number_of_rows(rows: int, level: Level) -> None:
    model = build()
    texts = [ids(3 + i % 5, i) for i in range(rows)]
    expected = own_logits(model, texts)
    got = fused_logits(runner(model, level, threads=2), texts, [100] * rows, 16)
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


def test_forgotten_runners_leave_no_threads() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    gc.collect()  # runners that earlier tests forgot
    made = runner(build(), threads=4)
    several = count()
    del made
    gc.collect()
    assert count() == several - 3


def test_the_lowest_of_equal_ids_wins(level: Level) -> None:
    model = build()
    model.lm_head.weight[:] = model.lm_head.weight[3]
    made = runner(model, level, threads=2)
    plan = flatten(PagedStep((PagedRow(0, (1, 2), 0, (0,), GREEDY),)), block_tokens=16, total_blocks=160)
    assert made.run(plan, [False])[0] == [0]


def test_the_breakdown_starts_anew_each_time() -> None:
    made = runner(build())
    plan = flatten(PagedStep((PagedRow(0, (1, 2), 0, (0,), GREEDY),)), block_tokens=16, total_blocks=160)
    made.run(plan, [False])
    spent = made.breakdown_ms()
    assert tuple(spent) == PARTS
    assert all(ms > 0 for ms in spent.values())
    assert set(made.breakdown_ms().values()) == {0.0}


@pytest.mark.parametrize(
    ("changes", "block_tokens", "reason"),
    [
        ({"head_dim": 24}, 16, "head_dim is 24"),
        ({"intermediate_size": 100}, 16, "intermediate_size is 100"),
        ({}, 8, "block_tokens is 8"),
        ({"hidden_act": "gelu"}, 16, "activation is gelu"),
        ({"kind": transformers.MixtralConfig}, 16, "mixtral is not one of"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(changes: dict[str, Any], block_tokens: int, reason: str) -> None:
    with pytest.raises(KernelsUnavailable, match=reason):
        FusedRunner(
            build(**changes),
            total_blocks=4,
            block_tokens=block_tokens,
            max_model_len=32,
            threads=1,
            level=choose("auto"),
        )


def test_other_formats_are_refused() -> None:
    with pytest.raises(KernelsUnavailable, match=r"no kernels for torch\.float16"):
        load_library(torch.float16, choose("auto"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 300])
def test_the_bits_do_not_depend_on_company_chunks_or_threads(level: Level, dtype: torch.dtype, window: int) -> None:
    """Logits of prompts of many lengths: alone and whole, cut in chunks, in company, on one to three threads."""
    changes = {"kind": transformers.MistralConfig, "sliding_window": window} if window else {}
    model = build(dtype, head_dim=16, **changes)
    texts = [ids(count, seed) for seed, count in enumerate((60, 257, 900, 128, 601))]
    made = runner(model, level)
    alone = torch.cat([fused_logits(made, [text], [len(text)], 16) for text in texts])
    for threads, chunks in ((1, [7, 100, 128, 1, 600]), (2, [60, 256, 899, 127, 33]), (3, [60, 257, 900, 128, 601])):
        made = runner(model, level, threads=threads, total_blocks=160)
        assert torch.equal(fused_logits(made, texts, chunks, 16), alone), (threads, chunks)


ROWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.5, 40.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 600, 100_000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    seed=st.integers(0, 2**53 - 1),
    logprobs=st.sampled_from([None, 0, 1, 20]),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, min_size=1, max_size=9),
    vocab=st.sampled_from([1, 2, 15, 16, 63, 64, 65, 1000, 5003]),
    kind=st.sampled_from(["spread", "peaked", "flat", "ties", "minus infinity", "nan", "infinity"]),
    seed=st.integers(0, 1000),
)
def test_the_kernels_choose_as_the_reference_does(
    level: Level, rows: list[SamplingParams], vocab: int, kind: str, seed: int
) -> None:
    made = _chooser(level.name)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "peaked":
        logits[:, vocab // 2] += 30
    elif kind == "flat":
        logits[:] = 0.25
    elif kind == "ties":
        logits.round_()
    elif kind != "spread":
        bad = {"minus infinity": -math.inf, "nan": math.nan, "infinity": math.inf}[kind]
        logits[::2, :: max(1, vocab // 7)] = bad
    positions = [seed + index for index in range(len(rows))]
    ids, logprobs = made.sample(logits, rows, positions)
    expected, expected_logprobs = sample(logits, rows, positions)
    assert ids == expected
    assert (logprobs is None) == (expected_logprobs is None)
    for mine, theirs in zip(logprobs or [], expected_logprobs or [], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine[0] == pytest.approx(theirs[0], abs=1e-5)
            assert [value for _, value in mine[1]] == pytest.approx([value for _, value in theirs[1]], abs=1e-5)


@cache
def _chooser(level: str) -> FusedRunner:
    return runner(build(), choose(level), threads=2)
