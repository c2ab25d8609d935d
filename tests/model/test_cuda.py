"""The models on a GPU: what transformers says there, graphs or not, and steps that run out of memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio

from lab_tools.gpu.checks import agreement, alone, together
from wsbatch.config import EngineConfig
from wsbatch.engine.open import make_scheduler
from wsbatch.engine.worker import ThreadWorker
from wsbatch.errors import StepFailed
from wsbatch.messages import SamplingParams
from wsbatch.model.loading import DTYPES, LoadedModel, load
from wsbatch.model.padded import PaddedModel
from wsbatch.model.paged import PagedModel
from wsbatch.model.ragged import flatten
from wsbatch.model.sampling import sample
from wsbatch.steps import PagedRow, PagedStep
from wsbatch_bench.steps.bare_loop import LoopRequest, run_loop

DEVICE = "cuda"
FAMILIES = ["llama", "qwen3", "mistral", "gpt2"]
HALF_BLOCK = 256  # torch's paged attention reads no smaller ones

Directory = Callable[[str], Path]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 97, (tokens,), generator=generator).tolist())


def requests(*sizes: tuple[int, int]) -> list[LoopRequest]:
    """Of (prompt, output) tokens."""
    return [LoopRequest(prompt(index, tokens), new) for index, (tokens, new) in enumerate(sizes)]


def short(directory: Directory, family: str) -> LoadedModel:
    return load(str(directory(family)), dtype="float32", device=DEVICE)


def long(directory: Directory, family: str, dtype: str) -> LoadedModel:
    """Rows of several large blocks, Mistral's window wider than one of them."""
    config: Any = transformers.AutoConfig.from_pretrained(directory(family))
    config.max_position_embeddings = 8192
    config.initializer_range = 0.2  # rounding grows with the weights
    if family == "mistral":
        config.sliding_window = 300
    torch.manual_seed(5)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    info = replace(load(str(directory(family)), device="cpu").info, dtype=dtype, device=DEVICE, max_model_len=8192)
    return LoadedModel(module.to(DTYPES[dtype]).to(DEVICE).eval().requires_grad_(False), Path(), info)


@pytest.mark.parametrize("chunk", [1, 7, 16, 39, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_says_what_generate_says(tiny_directory: Directory, family: str, chunk: int) -> None:
    """Rows of 5, 23 and 40 tokens and a late fourth, two at a time: they join and leave beside each other."""
    loaded = short(tiny_directory, family)
    asked = requests((5, 6), (23, 3), (40, 9), (17, 5))
    expected = [alone(loaded.model, request) for request in asked]
    model = PagedModel(loaded, total_blocks=12, block_tokens=16)
    assert together(model, asked, chunk=chunk, block_tokens=16, total_blocks=12, rows=2) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_say_what_generate_says(tiny_directory: Directory, family: str) -> None:
    loaded = short(tiny_directory, family)
    asked = requests((5, 6), (23, 3), (40, 9))
    expected = [alone(loaded.model, request) for request in asked]
    scheduler = make_scheduler(EngineConfig(scheduler="dynamic", max_wait_ms=0.0), now_s=0.0)
    assert [row.token_ids for row in run_loop(PaddedModel(loaded), scheduler, asked).rows] == expected


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_agrees_where_the_margin_decides(
    tiny_directory: Directory, family: str, dtype: str, graphs: bool
) -> None:
    loaded = long(tiny_directory, family, dtype)
    asked = requests((5, 20), (300, 8), (700, 30), (254, 12), (90, 9))
    reference = long(tiny_directory, family, dtype).model  # whose attention is not replaced
    model = PagedModel(loaded, total_blocks=16, block_tokens=HALF_BLOCK, graphs=graphs)
    outputs = together(model, asked, chunk=200, block_tokens=HALF_BLOCK, total_blocks=16, rows=3)
    found = [agreement(reference, request, output) for request, output in zip(asked, outputs, strict=True)]
    assert sum(each.wrong for each in found) == 0
    assert sum(each.decided for each in found) >= sum(each.tokens for each in found) / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_path_is_taken(tiny_directory: Directory, family: str) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs compute capability 8")
    for graphs, ending in ((True, "variable-length attention, CUDA graphs"), (False, "variable-length attention")):
        model = PagedModel(
            long(tiny_directory, family, "bfloat16"), total_blocks=4, block_tokens=HALF_BLOCK, graphs=graphs
        )
        assert model.runner == f"modules, {ending}"


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_the_logits_of_the_model(tiny_directory: Directory, family: str) -> None:
    """Every number of rows up to 9, so that graphs are filled up; contexts around the block's end."""
    contexts = (3, 255, 256, 257, 511, 700, 40, 90, 300)
    blocks = 3 * len(contexts)

    def logits(graphs: bool) -> list[torch.Tensor]:
        loaded = long(tiny_directory, family, "bfloat16")
        runner = PagedModel(loaded, total_blocks=blocks, block_tokens=HALF_BLOCK, graphs=graphs)._runner
        tables = [(index, index + len(contexts), index + 2 * len(contexts)) for index in range(len(contexts))]
        found = []
        for row, (context, table) in enumerate(zip(contexts, tables, strict=True)):
            plan = PagedStep((PagedRow(row, prompt(row, context), 0, table, None),))
            runner.run(flatten(plan, block_tokens=HALF_BLOCK, total_blocks=blocks), [])
        for count in range(1, len(contexts) + 1):
            rows = [PagedRow(row, (row + 1,), contexts[row], tables[row], SamplingParams()) for row in range(count)]
            plan = PagedStep(tuple(rows))
            step = flatten(plan, block_tokens=HALF_BLOCK, total_blocks=blocks)
            found.append(runner.run(step, [True] * count)[1].float().clone())
        return found

    for ours, plain in zip(logits(True), logits(False), strict=True):
        assert float((ours - plain).abs().max()) <= 0.05 * float(plain.abs().max())


def test_the_device_draws_the_tokens_that_the_host_draws() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2, logprobs=2),
        SamplingParams(temperature=1.3, top_k=7, seed=3),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.5, seed=4, logprobs=0),
        SamplingParams(temperature=1.0, top_p=0.999, seed=5),
    ]
    host, host_logprobs = sample(logits, rows, range(6))
    device, device_logprobs = sample(logits.to(DEVICE), rows, range(6))
    assert device == host
    assert host_logprobs is not None
    assert device_logprobs is not None
    for ours, theirs in zip(device_logprobs, host_logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
            assert [token for token, _ in ours[1]] == [token for token, _ in theirs[1]]


async def test_a_step_without_memory_fails_and_the_next_one_runs(tiny_directory: Directory) -> None:
    expected: list[int] = []

    def build() -> PagedModel:
        loaded = long(tiny_directory, "llama", "float32")
        expected.extend(alone(loaded.model, LoopRequest(prompt(0, 20), 1)))
        return PagedModel(loaded, total_blocks=500, block_tokens=16)

    def step(tokens: int) -> PagedStep:
        return PagedStep((PagedRow(0, prompt(0, tokens), 0, tuple(range(-(-tokens // 16))), SamplingParams()),))

    worker = ThreadWorker()
    async with trio.open_nursery() as nursery:
        await nursery.start(worker.run, build)
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total_bytes)
        try:
            for _ in range(2):
                with pytest.raises(StepFailed, match="OutOfMemoryError") as caught:
                    await worker.step(step(7000))  # its mask alone has 49 million places
                assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
                assert list((await worker.step(step(20))).token_ids) == expected
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            worker.close()
