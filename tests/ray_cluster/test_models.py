"""Replicas of real models on a real Ray: a stream that goes on elsewhere, and one that must not."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio
from tokenizers import decoders, models, pre_tokenizers

from wsbatch.config import EngineConfig
from wsbatch.messages import Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.pool import EnginePool

from .harness import Load, all_ready, fleet_of, kill, resumed

pytest.importorskip("ray", reason="needs the extra `ray`")
# Ray leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.demo
async def test_a_replica_of_the_demo_model_is_killed_amid_its_streams(cluster: Any) -> None:
    engine = EngineConfig(model="demo", dtype="float32", threads=1)
    async with fleet_of(2, engine, cluster) as fleet, Load(fleet.pool, kinds=6, max_tokens=40) as load:
        async with load.running(6, at_least=6):
            await load.more_tokens(60)
            await kill(fleet, "replica-1")
            await all_ready(fleet, 1)
        assert resumed(fleet.pool) > 0
        assert load.served >= 6
        assert load.wrong == []


def save_model(directory: Path, *, seed: int) -> Path:
    """A tiny random Llama whose tokens are bytes, and which has room for a long output."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1_000_000,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: id_ for id_, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


async def ask(pool: EnginePool, max_tokens: int, *, started: trio.Event | None = None) -> tuple[str, str]:
    """The text and how it ended."""
    text, reason = "", ""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=7)
    async with pool.generate(GenerateRequest(prompt="What is new?", sampling=sampling)) as stream:
        async for event in stream:
            if isinstance(event, Tokens | Finished):
                text += event.text
            if isinstance(event, Tokens) and started is not None:
                started.set()
            if isinstance(event, Finished):
                reason = event.finish_reason
    return text, reason


async def test_another_revision_is_put_into_service(cluster: Any, tmp_path: Path) -> None:
    """Under the name that `--model` has: what was begun by the old one ends there, or is told that it cannot go on."""
    link = tmp_path / "current"
    for seed in (1, 2):
        save_model(tmp_path / f"revision-{seed}", seed=seed)
    link.symlink_to("revision-1")
    engine = EngineConfig(model=str(link), dtype="float32", threads=1, max_batch_total_tokens=1_000_000)
    async with fleet_of(1, engine, cluster, drain_s=1.0) as fleet:
        old, old_revision = await ask(fleet.pool, 60), fleet.pool.info.revision
        link.unlink()
        link.symlink_to("revision-2")
        seen = []
        rolled = False

        async def client() -> None:
            while not rolled:
                seen.append(await ask(fleet.pool, 60))

        async def endless() -> None:
            text, reason = await ask(fleet.pool, 900_000, started=started)
            assert (reason, text.startswith(old[0])) == ("shutdown", True)

        started = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(endless)
            await started.wait()
            nursery.start_soon(client)
            await fleet.replace_all()
            rolled = True
        new = await ask(fleet.pool, 60)
        assert old[1] == new[1] == "length"
        assert old[0] != new[0]
        assert fleet.pool.info.revision != old_revision
        # Each had all of its text from one revision.
        assert set(seen) == {old, new}
        assert resumed(fleet.pool) == 0
