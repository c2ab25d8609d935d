"""Ragged paged steps: every row gets what the model would have said to it alone, on both runners."""

import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wsbatch.messages import SamplingParams
from wsbatch.model import attention, compiled, probe
from wsbatch.model.graphs import DecodeGraphs
from wsbatch.model.levels import choose
from wsbatch.model.loading import LoadedModel
from wsbatch.model.modules import ModulesRunner
from wsbatch.model.paged import PagedModel
from wsbatch.model.ragged import Ragged
from wsbatch.model.sampling import sample
from wsbatch.steps import ModelInfo, PaddedDecode, PagedRow, PagedStep

VOCAB, POSITIONS, BLOCK, BLOCKS, NEW = 97, 128, 16, 40, 6
GREEDY = SamplingParams()
FUSED = ["llama", "qwen2", "qwen3", "mistral"]
FAMILIES = [*FUSED, "gpt2"]
LENGTHS = (5, 23, 40)  # shorter than a block, and longer than Mistral's window; none ends with a block

Make = Callable[[str], LoadedModel]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def make() -> Make:
    """A fresh copy of a family's tiny random model in float32: the modules runner replaces its attention."""
    made: dict[str, Any] = {}

    def loaded(family: str) -> LoadedModel:
        if family not in made:
            made[family] = build(family)
        info = ModelInfo(family, "r", "float32", "cpu", POSITIONS, VOCAB, frozenset())
        return LoadedModel(copy.deepcopy(made[family]), Path(), info)

    return loaded


def build(family: str, **changes: Any) -> Any:
    """Weights this large make every output depend on the whole prompt; biases are random too, or they test nothing."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    general: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.3, "tie_word_embeddings": False, **ends}
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**general, **shape, attention_bias=True, mlp_bias=True, **changes),
        "qwen2": lambda: transformers.Qwen2Config(**general, **shape, **changes),
        "qwen3": lambda: transformers.Qwen3Config(**general, **shape, head_dim=32, **changes),
        "mistral": lambda: transformers.MistralConfig(**general, **shape, **{"sliding_window": 9, **changes}),
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, **general),
        "gemma2": lambda: transformers.Gemma2Config(**general, **shape, head_dim=16),
        "mamba": lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
        "llama4": lambda: transformers.Llama4TextConfig(**general, **shape, head_dim=16, num_local_experts=2),
        "doge": lambda: transformers.DogeConfig(**general, **shape, keep_window_size=32),
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


def alone(loaded: LoadedModel, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """What `transformers.generate` says to this prompt and nobody else."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


class Stream:
    """A request as a plain scheduler sees it: its tokens, how many are in the pool, and its blocks."""

    def __init__(self, key: int, prompt: Sequence[int], blocks: Iterator[int], new: int = NEW) -> None:
        self.key, self.tokens, self.prompt, self.new, self.done = key, list(prompt), len(prompt), new, 0
        self.table = tuple(next(blocks) for _ in range(-(-(self.prompt + new) // BLOCK)))

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]

    @property
    def finished(self) -> bool:
        return len(self.output) == self.new

    def row(self, chunk: int, sampling: SamplingParams = GREEDY) -> PagedRow:
        new = tuple(self.tokens[self.done : self.done + chunk])
        ends = self.done + len(new) == len(self.tokens)
        return PagedRow(self.key, new, self.done, self.table, sampling if ends else None)

    def took(self, row: PagedRow, ids: Iterator[int]) -> None:
        self.done += len(row.token_ids)
        if row.sampling is not None:
            self.tokens.append(next(ids))


def step(model: PagedModel, streams: Sequence[Stream], chunks: Sequence[int]) -> None:
    rows = [stream.row(chunk) for stream, chunk in zip(streams, chunks, strict=True)]
    ids = iter(model.run(PagedStep(tuple(rows))).token_ids)
    for stream, row in zip(streams, rows, strict=True):
        stream.took(row, ids)
    assert next(ids, None) is None


def shuffled_blocks(seed: int = 0) -> Iterator[int]:
    numbers = list(range(BLOCKS))
    random.Random(seed).shuffle(numbers)
    return iter(numbers)


def paged(loaded: LoadedModel, runner: str) -> PagedModel:
    if runner == "fused":
        try:
            compiled.load_library(torch.float32, choose("auto"))
        except compiled.KernelsUnavailable as error:
            pytest.skip(f"no compiled kernels here: {error}")
    return PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK, runner=runner)  # type: ignore[arg-type]


BOTH = [(family, "modules") for family in FAMILIES] + [(family, "fused") for family in FUSED]


@pytest.mark.parametrize(("family", "runner"), BOTH)
@pytest.mark.parametrize("chunk", ["1", "7", "block", "len-1", "len"])
def test_rows_together_say_what_each_says_alone(make: Make, family: str, runner: str, chunk: str) -> None:
    loaded = make(family)
    texts = prompts()
    expected = [alone(loaded, text) for text in texts]
    model = paged(loaded, runner)
    blocks = shuffled_blocks()
    streams = [Stream(key, text, blocks) for key, text in enumerate(texts)]
    sizes = {"1": lambda n: 1, "7": lambda n: 7, "block": lambda n: BLOCK, "len-1": lambda n: n - 1, "len": lambda n: n}
    while live := [stream for stream in streams if not stream.finished]:
        step(model, live, [sizes[chunk](stream.prompt) for stream in live])
    assert [stream.output for stream in streams] == expected


@pytest.mark.parametrize(("family", "runner"), [("qwen3", "modules"), ("llama", "fused"), ("mistral", "fused")])
def test_whoever_joins_and_leaves(make: Make, family: str, runner: str) -> None:
    loaded = make(family)
    texts = prompts((3, 9, 17, 30, 33, 48), seed=2)
    expected = [alone(loaded, text) for text in texts]
    model = paged(loaded, runner)

    @settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.randoms(use_true_random=False))
    def trace(rng: random.Random) -> None:
        numbers = list(range(BLOCKS))
        rng.shuffle(numbers)
        blocks = iter(numbers)
        waiting = [Stream(key, text, blocks) for key, text in enumerate(texts)]
        streams, running = list(waiting), []
        rng.shuffle(waiting)
        while waiting or running:
            joining = rng.randint(0 if running else 1, 2)
            running += waiting[:joining]
            del waiting[:joining]
            rng.shuffle(running)
            some = running[: rng.randint(1, len(running))]
            step(model, some, [rng.randint(1, 20) for _ in some])
            running = [stream for stream in running if not stream.finished]
        assert [stream.output for stream in streams] == expected

    trace()


@pytest.mark.parametrize("runner", ["modules", "fused"])
def test_recomputed_in_other_blocks_after_preemption(make: Make, runner: str) -> None:
    loaded = make("llama")
    text = prompts((20,))[0]
    expected = alone(loaded, text)
    model = paged(loaded, runner)
    blocks = shuffled_blocks()
    stream = Stream(0, text, blocks)
    for _ in range(3):
        step(model, [stream], [len(text)])
    stream.done = 0
    stream.table = tuple(next(blocks) for _ in stream.table)
    while not stream.finished:
        step(model, [stream], [100])
    assert stream.output == expected


@pytest.mark.parametrize("runner", ["modules", "fused"])
def test_blocks_shared_by_rows_with_a_common_prefix(make: Make, runner: str) -> None:
    loaded = make("llama")
    text = prompts((40,))[0]
    model = paged(loaded, runner)
    blocks = shuffled_blocks()
    first = Stream(0, text, blocks)
    while not first.finished:
        step(model, [first], [100])
    other = Stream(1, text[:32] + prompts((7,), seed=5)[0], blocks)
    other.table = first.table[:2] + other.table[2:]
    other.done = 32
    while not other.finished:
        step(model, [other], [3])
    assert other.output == alone(make("llama"), other.tokens[: other.prompt])
    assert first.output == alone(make("llama"), text)


@pytest.mark.parametrize("runner", ["modules", "fused"])
def test_logprobs_are_as_many_as_tokens_and_those_of_the_model(make: Make, runner: str) -> None:
    loaded = make("llama")
    texts = prompts()
    with torch.inference_mode():
        tables = [loaded.model(torch.tensor([text])).logits[0, -1].log_softmax(-1) for text in texts]
    model = paged(loaded, runner)
    blocks = shuffled_blocks()
    asked = [SamplingParams(logprobs=3), SamplingParams(), SamplingParams(temperature=0.8, seed=5, logprobs=0)]
    rows = [
        Stream(key, text, blocks).row(100, sampling)
        for key, (text, sampling) in enumerate(zip(texts, asked, strict=True))
    ]
    result = model.run(PagedStep(tuple(rows)))
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids) == 3
    assert result.logprobs[1] is None
    for index, count in ((0, 3), (2, 0)):
        entry = result.logprobs[index]
        assert entry is not None
        own, best = entry
        assert own == pytest.approx(float(tables[index][result.token_ids[index]]), abs=1e-3)
        assert [token for token, _ in best] == tables[index].topk(count).indices.tolist()


def test_sampled_tokens_do_not_depend_on_the_runner_or_the_company(make: Make) -> None:
    sampling = [SamplingParams(temperature=0.9, top_p=0.9, seed=seed) for seed in (1, 2, 3)]
    own = make("qwen2").model
    with torch.inference_mode():
        logits = torch.stack([own(torch.tensor([text])).logits[0, -1] for text in prompts()])
    expected, _ = sample(logits, sampling, LENGTHS)
    assert expected != logits.argmax(-1).tolist()
    outputs = []
    for runner, together in (("modules", True), ("fused", True), ("fused", False)):
        model = paged(make("qwen2"), runner)
        blocks = shuffled_blocks()
        rows = [
            Stream(key, text, blocks).row(100, s) for key, (text, s) in enumerate(zip(prompts(), sampling, strict=True))
        ]
        steps = [tuple(rows)] if together else [(row,) for row in rows]
        outputs.append([token for plan in steps for token in model.run(PagedStep(plan)).token_ids])
    assert outputs == [expected] * 3


@pytest.mark.parametrize("runner", ["modules", "fused"])
def test_a_step_without_sampling_rows_returns_nothing(make: Make, runner: str) -> None:
    model = paged(make("llama"), runner)
    result = model.run(PagedStep((PagedRow(0, (1, 2, 3), 0, (4,), None),)))
    assert (result.token_ids, result.logprobs) == ((), None)


@pytest.mark.parametrize("runner", ["modules", "fused"])
def test_bad_plans_are_refused_and_the_next_one_runs(make: Make, runner: str) -> None:
    loaded = make("llama")
    text = prompts((20,))[0]
    expected = alone(loaded, text, 1)
    model = paged(loaded, runner)
    good = PagedStep((PagedRow(0, tuple(text), 0, (3, 1), GREEDY),))
    bad = [
        (PagedRow(7, tuple(text), 0, (3,), GREEDY), "row 7: block_table has 1 blocks"),
        (PagedRow(7, (), 0, (3,), GREEDY), "row 7: token_ids is empty"),
        (PagedRow(7, (1,), 0, (BLOCKS,), GREEDY), f"outside 0..{BLOCKS - 1}"),
        (PagedRow(7, (VOCAB,), 0, (3,), GREEDY), f"outside 0..{VOCAB - 1}"),
        (PagedRow(7, (1,), POSITIONS, tuple(range(9)), GREEDY), f"max_model_len={POSITIONS}"),
    ]
    for row, message in bad:
        with pytest.raises(ValueError, match=message):
            model.run(PagedStep((*good.rows, row)))
        assert list(model.run(good).token_ids) == expected
    with pytest.raises(TypeError, match="PaddedDecode"):
        model.run(PaddedDecode())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "does not use transformers' attention interface"),
        ("gemma2", "its attention uses softcap"),
        ("llama4", "layers of type chunked_attention"),
        ("doge", "its attention uses attention_mask"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(make: Make, family: str, reason: str) -> None:
    loaded = make(family)
    before = alone(loaded, [1, 2, 3], 2)
    with pytest.raises(ValueError, match=reason):
        PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK)
    assert alone(loaded, [1, 2, 3], 2) == before  # it can still be served another way


def test_a_model_that_would_answer_otherwise_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make("gpt2")
    layer = type(loaded.model.transformer.h[0].attn)
    own = layer.forward

    def remembering(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Mixes neighbouring tokens outside the attention function, as a convolution or a recurrence would."""
        return own(self, hidden + hidden.roll(1, dims=1), *args, **kwargs)

    monkeypatch.setattr(layer, "forward", remembering)
    with pytest.raises(ValueError, match="off by"):
        PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK)


def test_what_happens_only_beyond_a_window_is_checked_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = LoadedModel(build("mistral", sliding_window=32), Path(), make("mistral").info)
    own = attention._by_row
    monkeypatch.setattr(attention, "_by_row", lambda *arguments: own(*arguments[:-1], None))
    with pytest.raises(ValueError, match="off by"):
        PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK, runner="modules")


def test_the_windows_and_periods_that_a_configuration_names() -> None:
    def spans(config: transformers.PretrainedConfig) -> dict[str, int]:
        return probe.spans(config, 10_000)

    assert spans(transformers.MistralConfig(sliding_window=300)) == {"sliding_window": 300}
    assert spans(transformers.Qwen3Config(use_sliding_window=False, sliding_window=300)) == {}
    assert spans(transformers.LlamaConfig(sliding_window=300)) == {}  # the architecture does not read it
    assert spans(transformers.Llama4TextConfig()) == {"attention_chunk_size": 8192, "floor_scale": 8192}
    assert spans(transformers.DogeConfig(sliding_window=None)) == {"keep_window_size": 2048}
    assert probe.spans(transformers.DogeConfig(), 2048) == {}  # no row gets beyond it


def test_what_cannot_be_checked_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "spans", lambda config, reach: {"sliding_window": 5000, "attention_period": 6000})
    with pytest.raises(ValueError, match="what happens beyond attention_period=6000 tokens cannot be checked"):
        PagedModel(make("gpt2"), total_blocks=BLOCKS, block_tokens=BLOCK)


def test_decode_steps_are_checked_at_load_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModulesRunner.run

    def wrong_alone(self: ModulesRunner, ragged: Ragged, wanted: Sequence[bool]) -> Any:
        ids, logits, broken = own(self, ragged, wanted)
        return ids, logits.flip(0) if len(ragged.token_ids) == len(ragged.kv_lens) else logits, broken

    monkeypatch.setattr(ModulesRunner, "run", wrong_alone)
    with pytest.raises(ValueError, match="a decode step gives logits off by"):
        PagedModel(make("gpt2"), total_blocks=BLOCKS, block_tokens=BLOCK)


def test_an_error_for_want_of_memory_holds_none(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = make("llama")
    model = paged(loaded, "modules")
    held: list[weakref.ref[torch.Tensor]] = []
    plan = PagedStep((PagedRow(0, (1, 2, 3), 0, (4,), GREEDY),))
    with monkeypatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(loaded.model, "forward", full)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.run(plan)
    assert caught.value.__traceback__ is not None  # kept, as an engine that reports the error keeps it
    assert [reference() for reference in held] == [None]
    assert list(model.run(plan).token_ids) == alone(make("llama"), [1, 2, 3], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_never_looks_at_its_numbers(make: Make, family: str) -> None:
    """What a CUDA graph cannot record fails on tensors without contents, too."""
    model = make(family).model.to("meta")
    sizes = {"total_blocks": BLOCKS, "block_tokens": BLOCK, "max_model_len": POSITIONS}
    runner = ModulesRunner(model, **sizes)
    captured: list[torch.Tensor] = []

    def record(call: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
        captured.append(call())
        return (lambda: None), captured[-1]

    device = torch.device("meta")
    DecodeGraphs(runner._logits, runner._pool, widest=8, device=device, sizes=(1, 4), capture=record)
    assert [tuple(logits.shape) for logits in captured] == [(4, VOCAB), (1, VOCAB)]


def test_without_a_compiler_the_modules_runner_says_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = make("llama")
    text = prompts((23,))[0]
    expected = alone(loaded, text, 1)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING, "wsbatch.model"):
        model = PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK)
    assert model.runner == "modules"
    assert "no C++ compiler was found" in caplog.text
    assert list(model.run(PagedStep((PagedRow(0, tuple(text), 0, (3, 1), GREEDY),))).token_ids) == expected
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        PagedModel(make("llama"), total_blocks=BLOCKS, block_tokens=BLOCK, runner="fused")


def test_auto_takes_the_fused_runner_in_bfloat16_too(make: Make) -> None:
    try:
        compiled.load_library(torch.bfloat16, choose("auto"))
    except compiled.KernelsUnavailable as error:
        pytest.skip(f"no compiled kernels here: {error}")
    loaded = make("llama")
    loaded.model.to(torch.bfloat16)
    assert PagedModel(loaded, total_blocks=BLOCKS, block_tokens=BLOCK).runner == "fused"


def test_auto_takes_the_fused_runner_where_it_can(make: Make) -> None:
    paged(make("llama"), "fused")  # skips where there are no kernels
    assert PagedModel(make("llama"), total_blocks=BLOCKS, block_tokens=BLOCK).runner == "fused"
    assert PagedModel(make("gpt2"), total_blocks=BLOCKS, block_tokens=BLOCK).runner == "modules"
    assert PagedModel(make("llama"), total_blocks=BLOCKS, block_tokens=8).runner == "modules"
