"""Models for these tests: tiny random ones of four architectures, and the demo model, all through `loading.load`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from wsbatch.model.loading import LoadedModel, load

VOCAB = 97
POSITIONS = 64


def tiny_config(family: str) -> transformers.PretrainedConfig:
    """Weights this large make every output depend on the whole prompt; untied, or a token would only repeat itself."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    general = {"vocab_size": VOCAB, "initializer_range": 0.5, "tie_word_embeddings": False, **ends}
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, **general)
    general |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": POSITIONS,
    }
    general |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    if family == "llama":
        return transformers.LlamaConfig(**general)
    if family == "qwen3":
        return transformers.Qwen3Config(**general)
    assert family == "mistral"
    return transformers.MistralConfig(sliding_window=6, **general)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of the tiny model of a family: llama, gpt2, qwen3, or mistral (a sliding window of 6)."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            with torch.random.fork_rng():
                torch.manual_seed(7)
                model = transformers.AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return directory


@pytest.fixture(scope="session")
def tiny(tiny_directory: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """The tiny model of a family, loaded in float32 on the CPU, once."""
    made: dict[str, LoadedModel] = {}

    def loaded(family: str) -> LoadedModel:
        if family not in made:
            made[family] = load(str(tiny_directory(family)), dtype="float32", device="cpu", threads=1)
        return made[family]

    return loaded


@pytest.fixture(scope="session")
def demo() -> Callable[[str], LoadedModel]:
    """The demo model in a dtype, on the CPU, loaded once. The first call on a machine fetches and converts it."""
    made: dict[str, LoadedModel] = {}

    def loaded(dtype: str) -> LoadedModel:
        if dtype not in made:
            made[dtype] = load("demo", dtype=dtype, device="cpu", threads=1)
        return made[dtype]

    return loaded
