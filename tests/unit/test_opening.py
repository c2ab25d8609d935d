"""What `open_engine` settles once the model is loaded."""

import pytest

from wsbatch.config import EngineConfig
from wsbatch.engine.open import as_served, for_device, make_scheduler
from wsbatch.steps import ModelInfo


def info(device: str, dtype: str) -> ModelInfo:
    return ModelInfo("m", "r", dtype, device, 100_000, 97, frozenset())


@pytest.mark.parametrize(
    ("device", "dtype", "asked", "blocks"),
    [
        ("cuda", "bfloat16", 16, 256),
        ("cuda", "float16", 256, 256),
        ("cuda", "bfloat16", 257, 512),
        ("cuda", "float32", 16, 16),  # plain torch reads any block
        ("cpu", "bfloat16", 16, 16),
    ],
)
def test_blocks_fit_the_attention_of_the_device(device: str, dtype: str, asked: int, blocks: int) -> None:
    config = for_device(EngineConfig(block_tokens=asked, max_batch_total_tokens=1100), info(device, dtype))
    assert config.block_tokens == blocks
    cache = make_scheduler(config, now_s=0.0).cache()
    assert cache is not None
    assert cache.total_blocks == 1100 // blocks
    assert as_served(info(device, dtype), config).max_model_len == 1100 // blocks * blocks


def test_a_padded_batch_has_no_blocks() -> None:
    config = EngineConfig(scheduler="dynamic")
    assert for_device(config, info("cuda", "bfloat16")) is config
