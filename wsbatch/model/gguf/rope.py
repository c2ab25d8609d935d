"""Rotary position embeddings: from a GGUF file's keys and factor tensors to transformers' `rope_parameters`.

The meaning of the keys is llama.cpp's (`llama_model_base::load_hparams`, `ggml_rope_ext`); of the parameters,
transformers' (`modeling_rope_utils`).
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from wsbatch.model.gguf.file import GgufFile

_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_Doubles: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def rope_parameters(file: GgufFile, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """What `file` says about its rotary embedding.

    Args:
        head_dim: of the model's attention heads.
        partial: whether the architecture may rotate only a part of each head.

    Raises:
        ValueError: a scaling that cannot be carried over; the message names the key or the tensor.
    """
    parameters = {"rope_theta": file.take("rope.freq_base", 10_000.0), **_scaling(file)}
    dimensions = file.take("rope.dimension_count", head_dim)
    if dimensions != head_dim and not (partial and 0 < dimensions < head_dim):
        raise ValueError(f"rope.dimension_count = {dimensions} is not supported: heads have {head_dim} dimensions")
    if partial:
        parameters["partial_rotary_factor"] = dimensions / head_dim
    if file.claim(_FACTORS):
        factors = file.values(_FACTORS).reshape(-1).astype(np.float64)
        scaling = _llama3(factors, parameters["rope_theta"], dimensions)
        if scaling["rope_type"] != "default" and parameters["rope_type"] != "default":
            raise ValueError(f"{_FACTORS} beside rope.scaling.type = {parameters['rope_type']} is not supported")
        parameters |= scaling if scaling["rope_type"] != "default" else {}
    return parameters


def _scaling(file: GgufFile) -> dict[str, Any]:
    """The keys `rope.scaling.*`, as far as the kind of scaling uses them."""
    factor = file.take("rope.scaling.factor") or file.take("rope.scale_linear") or 1.0
    file.ignore(["rope.scale_linear", "rope.scaling.finetuned"])
    kind = file.take("rope.scaling.type", "linear")
    context = file.take("rope.scaling.original_context_length") or file.need("context_length")
    file.expect("rope.scaling.alpha", 0.0)
    file.expect("rope.scaling.yarn_log_multiplier", 0.0)
    unscaled = kind == "none" or (kind == "linear" and factor == 1.0)
    if kind == "longrope" or (unscaled and _LONG in file.tensors):  # Phi-3's files have the factors alone
        return {
            "rope_type": "longrope",
            "long_factor": _factor_list(file, _LONG),
            "short_factor": _factor_list(file, _SHORT),
            "original_max_position_embeddings": context,
            "attention_factor": file.take("rope.scaling.attn_factor", 1.0),
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": context,
            **_yarn(file, factor),
        }
    file.expect("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type = {kind} is not supported (only none, linear, yarn or longrope)")
    if unscaled:
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    """The fine tuning of YaRN (Peng et al. 2023). llama.cpp's negative values mean: not set."""
    file.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    tuned = {
        name: value
        for name in ("beta_fast", "beta_slow")
        if (value := file.take(f"rope.scaling.yarn_{name}", -1.0)) >= 0
    }
    attention = file.take("rope.scaling.yarn_attn_factor", -1.0)
    multiplier = file.take("rope.scaling.attn_factor", 1.0)
    if attention < 0 and multiplier != 1.0:
        attention = 1.0 + 0.1 * math.log(factor)
    return tuned if attention < 0 else {**tuned, "attention_factor": attention * multiplier}


def _factor_list(file: GgufFile, name: str) -> list[float]:
    if not file.claim(name):
        raise ValueError(f"its rotary positions are scaled by LongRoPE, but it has no tensor {name}")
    factors: list[float] = file.values(name).reshape(-1).tolist()
    return factors


def _llama3(factors: _Doubles, theta: float, dimensions: int) -> dict[str, Any]:
    """The parameters of Llama 3's scaling (`rope_type: llama3`) that give these factors, [dimensions / 2].

    Such a file holds no parameters, only what each frequency is divided by: 1 where the wavelength is below
    context / high, the whole factor where it is above context / low, and between them 1 / ((1 - s) / factor + s) with
    s = (context / wavelength - low) / (high - low). Only the ratios of context, low and high matter, so low is 1. They
    follow from s, which is linear in 1 / wavelength.
    """
    if (factors == 1).all():
        return {"rope_type": "default"}
    factor = float(factors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dimensions, 2) / dimensions)
    if len(factors) == len(wavelengths) and factors.min() >= 1:
        for context, high in _candidates(wavelengths, factors, factor):
            if high > 1 and np.allclose(_llama3_factors(wavelengths, factor, context, high), factors, rtol=1e-5):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": context,
                }
    raise ValueError(f"{_FACTORS} holds other factors than Llama 3's scaling: {factors.tolist()!s:.80}")


def _llama3_factors(wavelengths: _Doubles, factor: float, context: float, high: float) -> _Doubles:
    smooth = (context / wavelengths - 1) / (high - 1)
    return 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))


def _candidates(wavelengths: _Doubles, factors: _Doubles, factor: float) -> Iterator[tuple[float, float]]:
    """Pairs of context and high (with low = 1) that may give the factors; rounded ones, as a model states them, first.

    One frequency between the limits leaves the pair open, none leaves it to a range: any that fits is exact, then.
    """
    between = (factors > 1) & (factors < factor)
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    if between.sum() > 1:
        slope, offset = np.polyfit(1 / wavelengths[between], smooth, 1)
        high = 1 - 1 / offset
        context = slope * (high - 1)
    elif between.any():
        high = 4.0
        context = (wavelengths[between] * (smooth * (high - 1) + 1)).item()
    else:
        longest_whole = wavelengths[factors == 1].max(initial=0)
        shortest_divided = wavelengths[factors > 1].min()
        high = (shortest_divided / longest_whole) ** (1 / 3) if longest_whole else 4.0
        context = shortest_divided / high
    yield round(context), round(high, 2)
    yield float(context), float(high)
