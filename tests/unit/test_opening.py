"""What `open_engine` settles once the model is loaded."""

import pytest
import trio
import trio.testing

from wsbatch.config import EngineConfig
from wsbatch.engine.metrics import EngineMetrics
from wsbatch.engine.open import as_served, for_device, make_scheduler, watch_loop
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


async def test_watching_the_loop_looks_at_every_connection_only_once_a_second(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trio's statistics walk over all sockets: at every tick that was a seventh of a server with 900 clients."""
    looks, statistics = 0, trio.lowlevel.current_statistics

    def count() -> trio.lowlevel.RunStatistics:
        nonlocal looks
        looks += 1
        return statistics()

    monkeypatch.setattr("trio.lowlevel.current_statistics", count)
    metrics = EngineMetrics()
    with trio.move_on_after(9.9):
        await watch_loop(metrics)
    assert looks == 10
    assert metrics.registry.get_sample_value("wsbatch_trio_tasks") == statistics().tasks_living
    assert metrics.registry.get_sample_value("wsbatch_event_loop_lag_seconds_count") == pytest.approx(1980, abs=2)


def test_a_padded_batch_has_no_blocks() -> None:
    config = EngineConfig(scheduler="dynamic")
    assert for_device(config, info("cuda", "bfloat16")) is config
