"""The GGUF architectures that are served: which keys make the configuration, and where each tensor goes.

Keys and tensors are those of llama.cpp's converter (`convert_hf_to_gguf.py`); what it changes in a tensor is undone
here. What a file does not say, llama.cpp's loader knows for each architecture (`load_arch_hparams`).
"""

import numpy as np

from wsbatch.model.gguf.architectures import Architecture, Change, Config
from wsbatch.model.gguf.file import Floats, GgufFile
from wsbatch.model.gguf.rope import rope_parameters

_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


def _decoder(file: GgufFile, model_type: str, *, norm: str = "rms", partial_rope: bool = False) -> Config:
    """What most decoders have in common."""
    heads, hidden = file.need("attention.head_count"), file.need("embedding_length")
    head_dim = file.take("attention.key_length", hidden // heads)
    file.expect("attention.value_length", head_dim)
    return {
        "model_type": model_type,
        "num_hidden_layers": file.need("block_count"),
        "max_position_embeddings": file.need("context_length"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": file.take("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": file.take("feed_forward_length") or file.need("expert_feed_forward_length"),
        **(
            {"rms_norm_eps": file.need("attention.layer_norm_rms_epsilon")}
            if norm == "rms"
            else {"norm_epsilon": file.need("attention.layer_norm_epsilon")}
        ),
        "rope_parameters": rope_parameters(file, head_dim, partial=partial_rope),
    }


def _refuse_window(file: GgufFile) -> None:
    """Accept a sliding window only where no input is longer: it is not said which layers have it."""
    window = file.take("attention.sliding_window", 0)
    if 0 < window < file.need("context_length"):
        raise ValueError(f"{file.architecture}.attention.sliding_window = {window} is not supported")


def _has(file: GgufFile, names: tuple[str, ...]) -> bool:
    return any(f"blk.0.{name}" in file.tensors for name in names)


def _llama(file: GgufFile) -> Config:
    config = _decoder(file, "llama")
    window = file.take("attention.sliding_window", 0)
    if 0 < window < config["max_position_embeddings"]:  # in every layer: that is transformers' Mistral
        if _has(file, _ATTENTION_BIASES + _MLP_BIASES):
            raise ValueError(f"llama.attention.sliding_window = {window} beside biases is not supported")
        return {**config, "model_type": "mistral", "sliding_window": window}
    return {**config, "attention_bias": _has(file, _ATTENTION_BIASES), "mlp_bias": _has(file, _MLP_BIASES)}


def _qwen2(file: GgufFile) -> Config:
    _refuse_window(file)
    return _decoder(file, "qwen2")


def _qwen3(file: GgufFile) -> Config:
    _refuse_window(file)
    return _decoder(file, "qwen3")


def _experts(file: GgufFile, model_type: str, *, normalised: bool) -> Config:
    """A decoder that chooses among experts in every layer, by a softmax; `normalised` is the architecture's default."""
    _refuse_window(file)
    file.expect("expert_gating_func", 1)
    return {
        **_decoder(file, model_type),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "num_experts": file.need("expert_count"),
        "num_experts_per_tok": file.need("expert_used_count"),
        "norm_topk_prob": file.take("expert_weights_norm", normalised),
    }


def _qwen2moe(file: GgufFile) -> Config:
    shared = file.need("expert_shared_feed_forward_length")
    return {**_experts(file, "qwen2_moe", normalised=False), "shared_expert_intermediate_size": shared}


def _qwen3moe(file: GgufFile) -> Config:
    return _experts(file, "qwen3_moe", normalised=True)


def _gemma2(file: GgufFile) -> Config:
    config = _decoder(file, "gemma2")
    return {
        **config,
        "query_pre_attn_scalar": _attention_scalar(config, largest_layers=46),
        "sliding_window": file.take("attention.sliding_window", 4096),
        "layer_types": _layer_types(file, config, pattern=2),
        "attn_logit_softcapping": file.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.take("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Config:
    config = _decoder(file, "gemma3_text")
    window = file.take("attention.sliding_window", 0)
    local = {"rope_type": "default", "rope_theta": file.take("rope.freq_base_swa", 10_000.0)}
    return {
        **config,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "query_pre_attn_scalar": _attention_scalar(config, largest_layers=62),
        "sliding_window": window or None,
        "layer_types": _layer_types(file, config, pattern=6 if window else 1),
        "final_logit_softcapping": file.take("final_logit_softcapping", 0.0) or None,
    }


def _attention_scalar(config: Config, *, largest_layers: int) -> int:
    """What attention scores are divided by, squared: the width of a head, but in the family's largest model."""
    if config["num_hidden_layers"] == largest_layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _layer_types(file: GgufFile, config: Config, *, pattern: int) -> list[str]:
    """Which layers see a window: the last of every `pattern` layers does not, unless the file lists them one by one."""
    listed = file.take("attention.sliding_window_pattern", pattern, many=True)
    layers = config["num_hidden_layers"]
    windowed = listed if isinstance(listed, list) else [(n + 1) % listed != 0 for n in range(layers)]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _phi3(file: GgufFile) -> Config:
    config = _decoder(file, "phi3", partial_rope=True)
    rope = config["rope_parameters"]
    if rope["rope_type"] not in ("default", "longrope"):
        raise ValueError(f"phi3.rope.scaling.type = {rope['rope_type']} is not supported (only none or longrope)")
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    window = file.take("attention.sliding_window", 0)
    return {**config, "original_max_position_embeddings": original, "sliding_window": window or None}


def _starcoder2(file: GgufFile) -> Config:
    _refuse_window(file)
    return _decoder(file, "starcoder2", norm="layer")


def _gpt2(file: GgufFile) -> Config:
    hidden = file.need("embedding_length")
    return {
        "model_type": "gpt2",
        "num_hidden_layers": file.need("block_count"),
        "n_positions": file.need("context_length"),
        "n_embd": hidden,
        "n_head": file.need("attention.head_count"),
        "n_inner": file.take("feed_forward_length", 4 * hidden),
        "layer_norm_epsilon": file.need("attention.layer_norm_epsilon"),
    }


def _paired(values: Floats, heads: int) -> Floats:
    """Rows of each head from llama.cpp's order, in which those that are rotated together are neighbours."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _query(values: Floats, config: Config) -> Floats:
    return _paired(values, config["num_attention_heads"])


def _key(values: Floats, config: Config) -> Floats:
    return _paired(values, config["num_key_value_heads"])


def _less_one(values: Floats, config: Config) -> Floats:
    return values - 1


def _transposed(values: Floats, config: Config) -> Floats:
    return values.T


def _as_row(values: Floats, config: Config) -> Floats:
    return np.atleast_2d(values)


def _weights(**names: str) -> dict[str, str]:
    return {f"{name}.weight": f"{target}.weight" for name, target in names.items()}


def _biased(names: dict[str, str]) -> dict[str, str]:
    return {name.replace(".weight", ".bias"): target.replace(".weight", ".bias") for name, target in names.items()}


_WHOLE = _weights(token_embd="model.embed_tokens", output_norm="model.norm", output="lm_head")
_QKV = _weights(attn_q="self_attn.q_proj", attn_k="self_attn.k_proj", attn_v="self_attn.v_proj")
_OUTPUT = _weights(attn_output="self_attn.o_proj")
_NORMS = _weights(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm")
_HEAD_NORMS = _weights(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_MLP = _weights(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_EXPERTS = _weights(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{expert}.gate_proj",
    ffn_up_exps="mlp.experts.{expert}.up_proj",
    ffn_down_exps="mlp.experts.{expert}.down_proj",
)
_SHARED_EXPERT = _weights(
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
_GEMMA_NORMS = _weights(
    attn_norm="input_layernorm",
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_GPT2_NORMS = _weights(attn_norm="ln_1", ffn_norm="ln_2")
_GPT2_PROJECTIONS = _weights(
    attn_qkv="attn.c_attn", attn_output="attn.c_proj", ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"
)
_STARCODER2_LAYER = _NORMS | _QKV | _OUTPUT | _weights(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")


def _less_one_in(*names: dict[str, str]) -> dict[str, Change]:
    return {name: _less_one for each in names for name in each}


ARCHITECTURES = {
    "llama": Architecture(
        _llama,
        whole=_WHOLE,
        layer=_NORMS | _QKV | _OUTPUT | _MLP | _biased(_QKV | _OUTPUT | _MLP),
        optional=frozenset({"output.weight", *_ATTENTION_BIASES, *_MLP_BIASES}),
        changes={
            f"attn_{name}.{kind}": change
            for name, change in (("q", _query), ("k", _key))
            for kind in ("weight", "bias")
        },
    ),
    "qwen2": Architecture(_qwen2, whole=_WHOLE, layer=_NORMS | _QKV | _biased(_QKV) | _OUTPUT | _MLP),
    "qwen3": Architecture(_qwen3, whole=_WHOLE, layer=_NORMS | _QKV | _HEAD_NORMS | _OUTPUT | _MLP),
    "qwen2moe": Architecture(
        _qwen2moe,
        whole=_WHOLE,
        layer=_NORMS | _QKV | _biased(_QKV) | _OUTPUT | _EXPERTS | _SHARED_EXPERT,
        changes={"ffn_gate_inp_shexp.weight": _as_row},
    ),
    "qwen3moe": Architecture(_qwen3moe, whole=_WHOLE, layer=_NORMS | _QKV | _HEAD_NORMS | _OUTPUT | _EXPERTS),
    "gemma2": Architecture(
        _gemma2,
        whole=_WHOLE,
        layer=_GEMMA_NORMS | _QKV | _OUTPUT | _MLP,
        changes=_less_one_in(_GEMMA_NORMS, _weights(output_norm="")),
    ),
    "gemma3": Architecture(
        _gemma3,
        whole=_WHOLE,
        layer=_GEMMA_NORMS | _QKV | _HEAD_NORMS | _OUTPUT | _MLP,
        changes=_less_one_in(_GEMMA_NORMS, _HEAD_NORMS, _weights(output_norm="")),
    ),
    "phi3": Architecture(
        _phi3,
        whole=_WHOLE,
        layer=_NORMS
        | _weights(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")
        | _OUTPUT,
    ),
    "starcoder2": Architecture(
        _starcoder2,
        whole=_WHOLE | {"output_norm.bias": "model.norm.bias"},
        layer=_STARCODER2_LAYER | _biased(_STARCODER2_LAYER),
    ),
    "gpt2": Architecture(
        _gpt2,
        whole=_weights(token_embd="transformer.wte", position_embd="transformer.wpe", output="lm_head")
        | {f"output_norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")},
        layer=_GPT2_NORMS | _GPT2_PROJECTIONS | _biased(_GPT2_NORMS | _GPT2_PROJECTIONS),
        layers="transformer.h",
        changes=dict.fromkeys(_GPT2_PROJECTIONS, _transposed),
    ),
}
