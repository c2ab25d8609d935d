"""Position encodings that follow the longest row of a batch: served up to where they do not, refused beyond."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from wsbatch.messages import SamplingParams
from wsbatch.model.loading import LoadedModel, load
from wsbatch.model.padded import PaddedModel
from wsbatch.model.paged import PagedModel
from wsbatch.model.positions import shared_angles
from wsbatch.steps import ModelInfo, PaddedDecode, PaddedRow, PaddedStart, PagedRow, PagedStep

VOCAB, ORIGINAL, LONGEST, NEW = 97, 48, 256, 4
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
PROMPT = tuple(range(40, 62))  # 22 tokens


def build(rope: dict[str, Any], positions: int) -> Any:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": positions}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.3}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        config = transformers.LlamaConfig(**shape, **ends, rope_parameters=rope, tie_word_embeddings=False)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def loaded(rope: dict[str, Any], positions: int, max_model_len: int) -> LoadedModel:
    return LoadedModel(
        build(rope, positions), Path(), ModelInfo("m", "r", "float32", "cpu", max_model_len, VOCAB, frozenset())
    )


def alone(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )
    said: list[int] = output[0, len(prompt) :].tolist()
    return said


def test_up_to_which_length_rows_share_their_angles() -> None:
    assert shared_angles(build(LONGROPE, LONGEST).config) == (ORIGINAL, "longrope")
    assert shared_angles(build(DYNAMIC, LONGEST).config) == (LONGEST, "dynamic")
    assert shared_angles(build({"rope_type": "default", "rope_theta": 1e4}, LONGEST).config) is None
    by_layer = transformers.Gemma3TextConfig(
        rope_parameters={"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    )
    assert shared_angles(by_layer) == (ORIGINAL, "longrope")


@pytest.mark.parametrize("model", [PaddedModel, lambda m: PagedModel(m, total_blocks=40, block_tokens=16)])
@pytest.mark.parametrize(
    ("rope", "positions", "bound"),
    [(LONGROPE, LONGEST, ORIGINAL), (DYNAMIC, ORIGINAL, ORIGINAL), ({**DYNAMIC, "factor": 2.0}, 128, 128)],
)
def test_longer_rows_are_refused_at_load(model: Any, rope: dict[str, Any], positions: int, bound: int) -> None:
    kind = rope["rope_type"]
    with pytest.raises(ValueError, match=rf"beyond {bound} tokens its position encoding \({kind}\) depends on"):
        model(loaded(rope, positions, bound + 1))
    assert model(loaded(rope, positions, bound)).info.max_model_len == bound


@pytest.mark.parametrize(("rope", "positions"), [(LONGROPE, LONGEST), (DYNAMIC, ORIGINAL)])
def test_company_changes_nothing_up_to_the_bound(rope: dict[str, Any], positions: int) -> None:
    neighbour = tuple((7 * i) % VOCAB for i in range(ORIGINAL - NEW))
    prompts = [PROMPT, neighbour]
    expected = [alone(build(rope, positions), prompt) for prompt in prompts]
    batch = PaddedModel(loaded(rope, positions, ORIGINAL))
    steps = [batch.run(PaddedStart(tuple(PaddedRow(i, p, SamplingParams()) for i, p in enumerate(prompts)), NEW))]
    steps += [batch.run(PaddedDecode()) for _ in range(NEW - 1)]
    assert [list(row) for row in zip(*(step.token_ids for step in steps), strict=True)] == expected
    ragged = PagedModel(loaded(rope, positions, ORIGINAL), total_blocks=6, block_tokens=16)
    tables = ((0, 1, 2), (3, 4, 5))
    plan = PagedStep(tuple(PagedRow(i, p, 0, tables[i], SamplingParams()) for i, p in enumerate(prompts)))
    assert list(ragged.run(plan).token_ids) == [said[0] for said in expected]


def test_a_loaded_model_is_served_up_to_the_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(LONGROPE, LONGEST).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "wsbatch.model"):
        found = load(str(tmp_path), dtype="float32", device="cpu")
    assert found.info.max_model_len == ORIGINAL
    assert f"max_model_len is {ORIGINAL}: beyond, the model's position encoding (longrope) depends on" in caplog.text
    assert load(str(tmp_path), device="cpu", max_model_len=20).info.max_model_len == 20
    with pytest.raises(ValueError, match=f"max_model_len=49 exceeds {ORIGINAL}: .* longest row of a batch"):
        load(str(tmp_path), device="cpu", max_model_len=49)
