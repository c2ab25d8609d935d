"""How a GGUF architecture becomes a Hugging Face checkpoint: its configuration, and the way of each of its tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wsbatch.model.gguf.file import Floats, GgufFile

Config = dict[str, Any]
Change = Callable[[Floats, Config], Floats]

# Keys that some files have and that none of these architectures uses: accepted with the values that mean "not so".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (1.0, 0.0),
    "expert_count": (0,),
    "expert_group_count": (0,),
    "expert_group_used_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (1.0, 0.0),
    "logit_scale": (1.0, 0.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1.0, 0.0),
    "tensor_data_layout": ("Meta AI original pth",),
}


class Move(NamedTuple):
    """One tensor's way.

    Attributes:
        source: its name in the GGUF file.
        targets: its name in the checkpoint; of a tensor that stacks experts, the name of each.
        stacked: whether it stacks experts.
        change: what is undone in it.
    """

    source: str
    targets: list[str]
    stacked: bool
    change: Change | None


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture becomes a checkpoint.

    Attributes:
        configure: from keys to the fields of transformers' configuration.
        whole: tensors that exist once: name in the GGUF file to name in the checkpoint.
        layer: tensors of each layer, without the prefixes `blk.<n>.` and `layers.<n>.`.
        layers: the prefix of a layer in the checkpoint.
        optional: names from `whole` and `layer` that a file may lack. Where one layer has a tensor, all must.
        changes: from a name in the GGUF file to what is undone in its tensor.
    """

    configure: Callable[[GgufFile], Config]
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    layers: str = "model.layers"
    optional: frozenset[str] = frozenset({"output.weight"})
    changes: Mapping[str, Change] = field(default_factory=dict)

    def moves(self, file: GgufFile, config: Config) -> list[Move]:
        """Where every tensor of the file goes; each is thereby accounted for.

        Raises:
            ValueError: tensors are missing; the message names them.
        """
        moves, missing = [], []
        for source, target, kind in self._names(file, config["num_hidden_layers"]):
            if not file.claim(source):
                missing.append(source)
                continue
            stacked = "{expert}" in target
            experts = range(config["num_experts"] if stacked else 1)
            moves.append(Move(source, [target.format(expert=n) for n in experts], stacked, self.changes.get(kind)))
        if missing:
            raise ValueError(f"it lacks {len(missing)} tensors, the first {missing[0]}")
        for n in range(config["num_hidden_layers"]):
            file.claim(f"blk.{n}.attn_rot_embd.weight")  # a buffer that old checkpoints kept: the rotary frequencies
        return moves

    def _names(self, file: GgufFile, layers: int) -> Iterator[tuple[str, str, str]]:
        """(name in the file, name in the checkpoint, name without a layer's prefix) of every tensor to be there."""
        for name, target in self.whole.items():
            if name not in self.optional or name in file.tensors:
                yield name, target, name
        for name, target in self.layer.items():
            sources = [f"blk.{n}.{name}" for n in range(layers)]
            if name not in self.optional or any(source in file.tensors for source in sources):
                for n, source in enumerate(sources):
                    yield source, f"{self.layers}.{n}.{target}", name


def configuration(file: GgufFile, architecture: Architecture) -> Config:
    """The fields of transformers' configuration; every key of the architecture is thereby accounted for.

    Raises:
        ValueError: a key is missing, or says what is not supported.
    """
    config = architecture.configure(file)
    if "token_embd.weight" not in file.tensors:
        raise ValueError("it has no token_embd.weight")
    config["vocab_size"] = int(file.tensors["token_embd.weight"].shape[1])
    file.expect("vocab_size", config["vocab_size"])
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name in ("bos", "eos", "pad"):
        config[f"{name}_token_id"] = file.take(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
    for key, values in _NEUTRAL.items():
        file.expect(key, *values)
    return config
