"""Which model a check runs on: one that `loading.load` finds, or a random Llama that needs neither hub nor index."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from wsbatch.model.loading import DTYPES, LoadedModel, load
from wsbatch.model.paged import PagedModel
from wsbatch.steps import ModelInfo

_hf: Any = transformers

# The shapes of SmolLM2-135M, Llama 3.2 1B and Llama 3.1 8B; the weights are noise.
RANDOM_LLAMAS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 1024,
    },
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """A model and the device it runs on.

    Attributes:
        model: as `--model` takes it; not read where `random_llama` names a size.
        random_llama: a key of RANDOM_LLAMAS, or None.
        device: cuda or cpu.
        dtype: float32, bfloat16 or float16.
    """

    model: str
    random_llama: str | None
    device: str
    dtype: str

    @property
    def block_tokens(self) -> int:
        """What fast attention on the device reads."""
        return 256 if self.device == "cuda" and self.dtype != "float32" else 16

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold `tokens`; two at least, which the check at load needs."""
        return max(2, -(-tokens // self.block_tokens))

    def build(self) -> LoadedModel:
        """The model on its device. Raises what `loading.load` raises, and torch.OutOfMemoryError."""
        if self.random_llama is None:
            return load(self.model, dtype=self.dtype, device=self.device)
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = _hf.LlamaConfig(**RANDOM_LLAMAS[self.random_llama], **ends)
        torch.manual_seed(0)
        with torch.device(self.device):  # 8 billion random numbers take the host minutes
            module = _hf.AutoModelForCausalLM.from_config(config, dtype=DTYPES[self.dtype])
        info = ModelInfo(
            name=f"random Llama {self.random_llama}",
            revision="random",
            dtype=self.dtype,
            device=self.device,
            max_model_len=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(),
        )
        return LoadedModel(module.to(self.device).eval().requires_grad_(False), Path(), info)

    def paged(self, loaded: LoadedModel, tokens: int, *, graphs: bool = True) -> PagedModel:
        """Put it behind a KV pool of at least `tokens`: the reference runner, which is the one that runs on CUDA."""
        return PagedModel(
            loaded,
            total_blocks=self.blocks(tokens),
            block_tokens=self.block_tokens,
            runner="modules",
            graphs=graphs,
        )
