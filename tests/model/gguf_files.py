"""GGUF files for tests: a transformers model written as llama.cpp's converter writes it.

Independent of the code under test: names come from the `gguf` package, and what is changed in a tensor is changed here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

WORDS = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|eom_id|>"]
LETTERS = [*(chr(c) for c in range(33, 123)), "AB"]
VOCAB = len(WORDS) + len(LETTERS)
POSITIONS = 64

# Keys of every architecture, by the field of the configuration that holds them.
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "mistral": "llama"}


def tiny_model(config: transformers.PretrainedConfig) -> Any:
    """A model of random weights, biases and norms too, that bfloat16 holds exactly."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(mean=float("norm" in name or ".ln_" in name), std=0.2)
                weight.copy_(weight.bfloat16().float())
    return model


def write_gguf(
    path: Path,
    model: Any,
    keys: Mapping[str, Any] | None = None,
    *,
    tensors: Mapping[str, "np.ndarray[Any, Any] | None"] | None = None,
    parts: int = 1,
) -> Path:
    """Write the model to `path`, or to parts named after it; the path of the first.

    Args:
        keys: more metadata, or other: without the architecture's prefix unless they begin with `general.` or
            `tokenizer.`; None leaves a key out.
        tensors: more tensors, or other, by their names in the file; None leaves a tensor out.
        parts: how many files.
    """
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    written = _tensors(model, architecture) | dict(tensors or {})
    written = {name: values for name, values in written.items() if values is not None}
    metadata = _metadata(config) | dict(keys or {})
    names = [f"{path.stem}-{n + 1:05}-of-{parts:05}.gguf" for n in range(parts)] if parts > 1 else [path.name]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(path.parent / name, architecture)
        if number == 0:
            for key, value in metadata.items():
                _add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}", value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
        for tensor in list(written)[number::parts]:
            writer.add_tensor(tensor, np.ascontiguousarray(written[tensor], dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path.parent / names[0]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _metadata(config: Any) -> dict[str, Any]:
    metadata = {key: value for field, key in _KEYS.items() if (value := getattr(config, field, None)) is not None}
    head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None) or {}
    return metadata | {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": WORDS + LETTERS,
        "tokenizer.ggml.token_type": [gguf.TokenType.CONTROL] * len(WORDS) + [gguf.TokenType.NORMAL] * len(LETTERS),
        "tokenizer.ggml.merges": ["A B"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors(model: Any, architecture: str) -> dict[str, "np.ndarray[Any, Any] | None"]:
    config = model.config
    (kind,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, values in _pieces(name, tensor):
            stem, _, suffix = part.rpartition(".")
            values = _changed(stem, values, config, architecture)
            found[f"{names.get_name(stem)}.{suffix}"] = values.numpy()
    return found


def _pieces(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A tensor under its name in a checkpoint; experts' gates and ups, which transformers keep as one, apart."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, tensor)]


def _changed(stem: str, values: torch.Tensor, config: Any, architecture: str) -> torch.Tensor:
    if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and stem.endswith("norm"):
        return values + 1
    if architecture == "gpt2" and stem.endswith(("c_attn", "c_proj", "c_fc")) and values.dim() == 2:
        return values.T
    return values[0] if stem.endswith("shared_expert_gate") else values
