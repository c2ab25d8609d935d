"""GGUF files: what is carried over, against transformers with the same set by hand; what is refused, by its name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from wsbatch.model import conversion
from wsbatch.model.conversion import parts
from wsbatch.model.gguf.checkpoint import write_checkpoint
from wsbatch.model.loading import load
from wsbatch.model.weights import revision

from .gguf_files import LETTERS, POSITIONS, VOCAB, WORDS, tiny_model, write_gguf

GENERAL = {"vocab_size": VOCAB, "initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    **GENERAL,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}

Config = transformers.PretrainedConfig


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **more}


def llama(**changes: Any) -> Config:
    return transformers.LlamaConfig(**SIZES | {"rope_parameters": rope()} | changes)


def convert(source: Path) -> Path:
    """Convert in this process; the new directory."""
    target = source.parent / f"{source.stem} converted"
    for _ in write_checkpoint(parts(source), target):
        pass
    return target


def check_same(converted: Path, reference: Any) -> None:
    """Weights equal, and outputs at every position beyond any window."""
    found = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    expected = reference.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    prompt = torch.arange(4 * 40).reshape(4, 40) * 7 % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(found(prompt).logits, reference(prompt).logits, rtol=1e-5, atol=1e-5)


FAMILIES: dict[str, tuple[Callable[[], Config], dict[str, Any]]] = {
    "llama": (lambda: llama(head_dim=16), {"rope.dimension_count": 16, "vocab_size": VOCAB, "expert_count": 0}),
    "llama with biases": (lambda: llama(attention_bias=True, mlp_bias=True), {}),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), {}),
    "mistral": (
        lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
        {"attention.sliding_window": 6},
    ),
    "qwen2": (lambda: transformers.Qwen2Config(**SIZES), {"attention.sliding_window": POSITIONS}),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES, head_dim=16), {}),
    "qwen2moe": (lambda: transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24), {}),
    "qwen3moe": (lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True), {}),
    "gemma2": (
        lambda: transformers.Gemma2Config(
            **SIZES | {"tie_word_embeddings": True}, **WINDOWED, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
        ),
        {"attention.sliding_window": 6},
    ),
    "gemma3": (
        lambda: transformers.Gemma3TextConfig(
            **SIZES | {"tie_word_embeddings": True, "num_hidden_layers": 7},
            **WINDOWED,
            rope_parameters={
                "full_attention": rope("linear", factor=8.0),
                "sliding_attention": rope() | {"rope_theta": 500.0},
            },
        ),
        {
            "attention.sliding_window": 6,
            "rope.freq_base_swa": 500.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        lambda: transformers.Phi3Config(
            **SIZES, sliding_window=6, rope_parameters=rope() | {"partial_rotary_factor": 0.5}
        ),
        {"attention.sliding_window": 6, "rope.dimension_count": 4},
    ),
    "starcoder2": (lambda: transformers.Starcoder2Config(**SIZES, rope_parameters=rope() | {"rope_theta": 77.0}), {}),
    "gpt2": (
        lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, n_inner=40, **GENERAL),
        {"feed_forward_length": 40},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_model(family: str, tmp_path: Path) -> None:
    config, keys = FAMILIES[family]
    reference = tiny_model(config())
    check_same(convert(write_gguf(tmp_path / "model.gguf", reference, keys)), reference)


def llama3_factors(theta: float, head_dim: int, **scaling: float) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes for a model with these parameters."""
    factors = []
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    for n in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (n / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        factors.append(1 / ((1 - min(max(smooth, 0), 1)) / scaling["factor"] + min(max(smooth, 0), 1)))
    return np.array(factors, dtype=np.float32)


def llama3(context: int, *, factor: float = 8.0, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    limits = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": context}
    return {"factor": factor, **limits}


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
TUNED = {"beta_fast": 8.0, "beta_slow": 2.0}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (rope("linear", factor=8.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "linear, of old": (rope("linear", factor=8.0), {"rope.scale_linear": 8.0}),
    "yarn": (rope("yarn", factor=4.0, original_max_position_embeddings=16), YARN),
    "yarn, tuned": (
        rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.25, **TUNED),
        {
            **YARN,
            "rope.scaling.yarn_attn_factor": 1.25,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_ext_factor": 1.0,
        },
    ),
    "none": (rope(), {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_positions_are_those_set_by_hand(name: str, tmp_path: Path) -> None:
    parameters, keys = SCALINGS[name]
    reference = tiny_model(llama(rope_parameters=parameters))
    check_same(convert(write_gguf(tmp_path / "model.gguf", reference, keys)), reference)


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (500_000.0, 128, llama3(8192)),  # Llama 3.1
        (500_000.0, 64, llama3(8192, factor=32.0)),  # Llama 3.2
        (10_000.0, 64, llama3(64, factor=4.0, low=2.0, high=6.0)),
        (500_000.0, 16, llama3(8192)),  # one frequency between the limits
        (500_000.0, 8, llama3(64)),  # none
        (10_000.0, 8, llama3(16)),
    ],
)
def test_frequency_factors_are_llama_3s_scaling(
    theta: float, head_dim: int, scaling: dict[str, Any], tmp_path: Path
) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    reference = tiny_model(llama(head_dim=head_dim, rope_parameters=parameters))
    factors = llama3_factors(theta, head_dim, **scaling)
    check_same(
        convert(write_gguf(tmp_path / "model.gguf", reference, tensors={"rope_freqs.weight": factors})), reference
    )


@pytest.mark.parametrize("kind", ["longrope", None])
def test_long_and_short_factors_are_longrope(kind: str | None, tmp_path: Path) -> None:
    short, long = [1.0, 1.1, 1.2, 1.3], [2.0, 3.0, 4.0, 5.0]
    parameters = rope("longrope", short_factor=short, long_factor=long, original_max_position_embeddings=16)
    parameters["attention_factor"] = 1.5
    config = transformers.Phi3Config(**SIZES, rope_parameters=parameters, original_max_position_embeddings=16)
    reference = tiny_model(config)
    keys = {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.5, "rope.scaling.type": kind}
    factors = {f"rope_factors_{name}.weight": np.array(v) for name, v in (("short", short), ("long", long))}
    converted = convert(write_gguf(tmp_path / "model.gguf", reference, keys, tensors=factors))
    check_same(converted, reference)


def test_what_changes_the_computation_changes_the_revision(tmp_path: Path) -> None:
    model = tiny_model(llama())
    factors = {"rope_freqs.weight": np.array([1, 1, 8, 8], dtype=np.float32)}
    found = {revision(convert(write_gguf(tmp_path / "plain.gguf", model)))}
    found.add(revision(convert(write_gguf(tmp_path / "factors.gguf", model, tensors=factors))))
    found.add(revision(convert(write_gguf(tmp_path / "window.gguf", model, {"attention.sliding_window": 6}))))
    for name in ("linear", "yarn", "yarn, tuned"):
        found.add(revision(convert(write_gguf(tmp_path / f"{name}.gguf", model, SCALINGS[name][1]))))
    assert len(found) == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 8}, r"llama\.expert_count = 8 is not supported \(only 0\)"),
        ({"logit_scale": 0.25}, r"llama\.logit_scale = 0\.25 is not supported"),
        ({"attention.causal": False}, r"llama\.attention\.causal = False is not supported"),
        ({"attention.value_length": 4}, r"llama\.attention\.value_length = 4 is not supported \(only 8\)"),
        ({"attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv differs from layer to layer"),
        ({"attention.temperature_length": 9}, r"not supported .*: llama\.attention\.temperature_length$"),
        ({"rope.dimension_count": 4}, r"rope\.dimension_count = 4 is not supported: heads have 8"),
        ({"rope.scaling.type": "dynamic"}, r"rope\.scaling\.type = dynamic is not supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.1}, r"llama\.rope\.scaling\.yarn_log_multiplier = 0\.1"),
        ({"rope.scaling.type": "longrope"}, r"has no tensor rope_factors_long\.weight"),
        ({"rope.dimension_sections": [1, 1, 2, 0]}, r"not supported .*: llama\.rope\.dimension_sections$"),
        ({"block_count": None}, r"it has no llama\.block_count"),
        ({"vocab_size": VOCAB + 1}, rf"llama\.vocab_size = {VOCAB + 1} is not supported \(only {VOCAB}\)"),
        ({"general.type": "adapter"}, "it holds no model: general.type is 'adapter'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, r"tokenizer\.ggml\.pre = deepseek-llm is not supported"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model = bert is not supported"),
        ({"tokenizer.ggml.normalizer.lowercase": True}, r"not supported .*: tokenizer\.ggml\.normalizer\.lowercase$"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(write_gguf(tmp_path / "model.gguf", tiny_model(llama()), keys))


def test_a_window_of_some_layers_is_refused(tmp_path: Path) -> None:
    model = tiny_model(transformers.Qwen2Config(**SIZES))
    with pytest.raises(ValueError, match=r"qwen2\.attention\.sliding_window = 6 is not supported"):
        convert(write_gguf(tmp_path / "model.gguf", model, {"attention.sliding_window": 6}))


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    writer_takes_it = tiny_model(
        transformers.GPTNeoXConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
        )
    )
    writer_takes_it.config.model_type = "gptneox"
    with pytest.raises(ValueError, match=r"the architecture gptneox is not supported \(only llama, qwen2,"):
        convert(write_gguf(tmp_path / "model.gguf", writer_takes_it))


SQUARE = np.zeros((32, 32), dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.ffn_up.weight": None}, r"it lacks 1 tensors, the first blk\.1\.ffn_up\.weight"),
        ({"token_embd.weight": None}, r"it has no token_embd\.weight"),
        ({"blk.2.attn_q.weight": SQUARE}, r"does not: blk\.2\.attn_q\.weight$"),
        ({"blk.1.attn_q_norm.weight": SQUARE[0]}, r"does not: blk\.1\.attn_q_norm\.weight$"),
        ({"blk.0.attn_q.bias": SQUARE[0]}, r"it lacks 1 tensors, the first blk\.1\.attn_q\.bias"),
        ({"rope_freqs.weight": np.array([1.0, 3.0, 2.0, 9.0])}, r"rope_freqs\.weight holds other factors than Llama 3"),
    ],
)
def test_missing_and_foreign_tensors_are_refused_by_name(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert(write_gguf(tmp_path / "model.gguf", tiny_model(llama()), tensors=tensors))


def test_a_split_model_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    model = tiny_model(llama())
    first = write_gguf(tmp_path / "model.gguf", model, parts=3)
    last = tmp_path / "model-00003-of-00003.gguf"
    check_same(convert(last), model)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ValueError, match=r"alone\.gguf is part 1 of 3: all parts must lie together"):
        convert(alone)
    last.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        FileNotFoundError, match=r"is one of 3 parts, of which are missing: model-00001-of-00003\.gguf, mo"
    ):
        conversion.from_gguf(tmp_path / "model-00002-of-00003.gguf", None)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.9])
def test_a_file_that_is_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model(llama()))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"^model\.gguf is no GGUF file, or cut short"):
        convert(path)


def test_every_token_that_ends_a_turn_ends_the_output(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 4}
    directory = convert(write_gguf(tmp_path / "model.gguf", tiny_model(llama()), keys))
    assert load(str(directory), device="cpu").info.eos_token_ids == {2, 3, 4}


def encode(directory: Path, text: str) -> list[str]:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).tokens


def test_text_is_split_as_the_vocabulary_was_made_for(tmp_path: Path) -> None:
    model = tiny_model(llama())
    keys = {"tokenizer.ggml.tokens": [*WORDS, *LETTERS[:-1], "12"], "tokenizer.ggml.merges": ["1 2"]}
    for split, expected in (("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("llama-bpe", ["12"])):
        path = write_gguf(tmp_path / f"{split}.gguf", model, keys | {"tokenizer.ggml.pre": split})
        assert encode(convert(path), "12") == expected


def test_other_files_beside_a_file_do_not_matter(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model(llama()))
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"A": 0}, unk_token="A"))
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("of another model")
    directory = convert(path)
    assert encode(directory, "A") == ["A"]
    assert encode(directory, "AB") == ["AB"]
    assert not (directory / "chat_template.jinja").exists()


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_space_is_put_before_a_text_where_the_file_says_so(prefix: bool | None, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", *(f"<0x{n:02X}>" for n in range(VOCAB - 6))]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(n) for n in range(VOCAB)],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1] + [6] * (VOCAB - 6),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    directory = convert(write_gguf(tmp_path / "model.gguf", tiny_model(llama()), keys))
    assert encode(directory, "a") == (["a"] if prefix is False else ["▁a"])


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsbatch.model.gguf.checkpoint._SHARD_BYTES", 10_000)
    model = tiny_model(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True))
    directory = convert(write_gguf(tmp_path / "model.gguf", model))
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    check_same(directory, model)


def test_a_file_is_converted_in_another_process_whatever_the_case_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "cache"))
    model = tiny_model(llama(rope_parameters=rope("linear", factor=8.0)))
    scaling = SCALINGS["linear"][1]
    path = write_gguf(tmp_path / "model.gguf", model, scaling).rename(tmp_path / "MODEL.GGUF")
    loaded = load(str(path), dtype="float32", device="cpu")
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(loaded.model.generate(prompt, **options), model.generate(prompt, **options))
    broken = write_gguf(tmp_path / "broken.gguf", model, scaling | {"expert_count": 8})
    with pytest.raises(OSError, match=r"cannot convert .*broken\.gguf: llama\.expert_count = 8 is not supported"):
        load(str(broken))
