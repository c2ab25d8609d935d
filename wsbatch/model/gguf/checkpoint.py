"""A GGUF model written as a Hugging Face checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from wsbatch.model.gguf.architectures import Config, Move, configuration
from wsbatch.model.gguf.families import ARCHITECTURES
from wsbatch.model.gguf.file import GgufFile
from wsbatch.model.gguf.tokenizer import end_token_ids, read_tokenizer

_SHARD_BYTES = 1 << 30
"""What is held in memory before it is written; a tensor larger than that is written alone."""


def write_checkpoint(paths: list[Path], target: Path) -> Iterator[None]:
    """Write configuration, tokenizer and bfloat16 weights to the new directory `target`; yields after each of three.

    The weights pass through memory tensor by tensor. They become bfloat16, finer than every quantised format.

    Args:
        paths: of the model's parts, in order.
        target: the directory, which must not exist yet.

    Raises:
        ValueError: the model is not supported, or not whole; the message names the key or the tensor.
        OSError: a file cannot be read or written.
    """
    file = GgufFile(paths)
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise ValueError(f"the architecture {file.architecture} is not supported (only {', '.join(ARCHITECTURES)})")
    config = configuration(file, architecture)
    moves = architecture.moves(file, config)
    ends = end_token_ids(file)
    tokenizer = read_tokenizer(file, paths[0])
    file.close_account()
    target.mkdir()
    _write_config(config, ends, target)
    yield
    tokenizer.save_pretrained(target)
    yield
    _write_weights(file, moves, config, target)
    yield


def _write_config(config: Config, ends: list[int], target: Path) -> None:
    import transformers

    hf: Any = transformers  # its own annotations cover only a part of what is called here
    made = hf.AutoConfig.for_model(**config)
    made.architectures = [hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]
    made.dtype = torch.bfloat16
    made.save_pretrained(target)
    generation = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config[name] is not None}
    hf.GenerationConfig(eos_token_id=ends or None, **generation).save_pretrained(target)


def _write_weights(file: GgufFile, moves: list[Move], config: Config, target: Path) -> None:
    """One file, or shards and their index."""
    shards: list[list[str]] = []  # the names of each one's tensors
    total_bytes = 0
    for number, shard in enumerate(_shards(file, moves, config)):
        save_file(shard, target / f"{number}.safetensors", {"format": "pt"})
        shards.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (target / "0.safetensors").rename(target / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"{number}.safetensors").rename(target / name)
        places |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _shards(file: GgufFile, moves: list[Move], config: Config) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size_bytes = 0
    for move in moves:
        values = file.values(move.source)
        if move.change is not None:
            values = move.change(values, config)
        stack = values if move.stacked else values[None]
        if len(stack) != len(move.targets):
            raise ValueError(f"{move.source} holds {len(stack)} experts, not {len(move.targets)}")
        tensors = torch.from_numpy(np.require(stack, requirements=["C", "W"])).bfloat16()
        if shard and size_bytes + tensors.nbytes > _SHARD_BYTES:
            yield shard
            shard, size_bytes = {}, 0
        for name, tensor in zip(move.targets, tensors, strict=True):
            shard[name] = tensor.clone() if move.stacked else tensor  # safetensors wants each in memory of its own
        size_bytes += tensors.nbytes
    if shard:
        yield shard
