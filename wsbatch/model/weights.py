"""A checkpoint's weights: which files hold them, what identifies them, and whether they are the model's, all of it."""

import hashlib
import json
import logging
import re
import struct
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from wsbatch.model.names import listed
from wsbatch.text.tokenizer_files import read_json

# transformers' own annotations cover only a part of what is called here.
_hf: Any = transformers

_log = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096

# Buffers that old checkpoints kept and that models now make themselves: causal masks, rotary frequencies.
_OLD_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_emb\.(inv_freq|(cos|sin)_cached))$")

# Quantised formats that transformers turns back into plain weights while it loads them.
_DEQUANTISED = {"fp8", "mxfp4"}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, as transformers chooses them: one, or those that its index names.

    Raises:
        FileNotFoundError: there are none, or some that the index names are missing.
        ValueError: the index is not one.
    """
    named = read_json(directory / "config.json").get("transformers_weights")
    whole = directory / (named if isinstance(named, str) else "model.safetensors")
    index = whole if whole.suffix == ".json" else directory / "model.safetensors.index.json"
    if whole.suffix != ".json" and whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"{directory} has neither {whole.name} nor {index.name}")
    content = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map must be an object from tensor names to file names")
    if not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index}: metadata must be an object")
    names = sorted(set(places.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{directory} lacks files that {index.name} names: {listed(missing)}")
    if not names:
        raise ValueError(f"{index}: weight_map is empty")
    return [directory / name for name in names]


def revision(directory: Path) -> str:
    """A cheap identity of the weights, the same on every machine: 16 hex digits of a sha256.

    Covers config.json (without the names and versions that a copy may change) and, of every file that holds weights,
    its header (names, shapes, dtypes), its size, and the first 4 KiB of each tensor's data. Two models that differ only
    beyond those bytes of every tensor would pass for equal; no training or quantisation leaves them alone.
    """
    config = read_json(directory / "config.json")
    for name in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in weight_files(directory):
        with path.open("rb") as stream:
            # Format: https://huggingface.co/docs/safetensors, a little-endian u64, that much JSON, the tensors' data.
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = stream.read(header_bytes)
            digest.update(header + path.stat().st_size.to_bytes(8, "little"))
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    stream.seek(8 + header_bytes + begin)
                    digest.update(stream.read(min(end - begin, _SAMPLE_BYTES)))
    return digest.hexdigest()[:16]


def check_quantisation(config: Any, path: Path) -> None:
    """Refuse weights in a format that needs kernels of its own. Raises ValueError, which names the format."""
    described = getattr(config, "quantization_config", None)
    if described is None:
        return
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    if method not in _DEQUANTISED:
        raise ValueError(
            f"{path}: the weights are quantised ({method}), which is not supported; the checkpoint that they were made "
            "from is, and so are GGUF files"
        )


def read_weights(directory: Path, dtype: torch.dtype) -> Any:
    """The module with its weights, in eval mode and without gradients.

    Raises:
        OSError: a file is missing or damaged, the model has tensors that the files lack (transformers would fill them
            with noise), or the files hold tensors that the model lacks (which it would drop).
        ValueError: the index of the files is not one, or the configuration is impossible.
    """
    for path in weight_files(directory):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise OSError(f"{path} cannot be read: {error}") from error
    try:
        module, report = _hf.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except Exception as error:
        raise ValueError(
            f"{directory / 'config.json'} describes no model that can be made: {one_line(error)}"
        ) from error
    for name, found, expected in sorted(report["mismatched_keys"]):
        sizes = f"{list(found)}, not {list(expected)} as its config.json says"
        raise OSError(f"the weights in {directory} do not fit: {name} is {sizes}")
    if missing := sorted(report["missing_keys"]):
        raise OSError(f"the weights in {directory} lack {len(missing)} tensors, the first {missing[0]}")
    _check_unused(module, directory, sorted(report["unexpected_keys"]))
    if odd := [name for name, weight in module.named_parameters() if not weight.is_floating_point()]:
        raise ValueError(f"the weights in {directory} are quantised, which is not supported: {listed(odd)}")
    return module.eval().requires_grad_(False)


def _check_unused(module: Any, directory: Path, names: list[str]) -> None:
    """Refuse tensors that would be dropped, where the model computes with what is beside them; tell of the others.

    `model.layers.0.mlp.up_proj.bias` belongs to a part of the model, be it one too many; `score.weight` (of a
    classifier) to something else.
    """
    parts = {name for name, _ in module.named_modules()} - {""}
    unused = [name for name in names if not _OLD_BUFFERS.search(name)]
    base = module.base_model_prefix  # files of the model without its head do not have it in their names
    within = [name for name in unused if _parents(name) & parts or _parents(f"{base}.{name}") & (parts - {base})]
    if within:
        raise OSError(
            f"the weights in {directory} hold {len(within)} tensors that a model of its config.json does not have: "
            f"{listed(within)}"
        )
    if unused:
        _log.warning("%s holds %d tensors that the model does not use: %s", directory, len(unused), listed(unused))


def _parents(name: str) -> set[str]:
    """The modules that a tensor of this name would lie in."""
    words = name.split(".")
    return {".".join(words[:end]) for end in range(1, len(words))}


def one_line(error: BaseException) -> str:
    """What an exception of a library says, short, on one line."""
    return " ".join((str(error) or repr(error)).split())[:300]
