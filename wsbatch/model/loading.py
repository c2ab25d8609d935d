"""From what the user names to a model in memory: Hugging Face id, local directory, `.gguf` file, or `demo`."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from wsbatch.model.compiled import KernelsUnavailable, find_compiler
from wsbatch.model.conversion import Progress, from_gguf
from wsbatch.model.demo import fetch_demo
from wsbatch.model.fused import check_config
from wsbatch.model.linears import LANES
from wsbatch.model.positions import shared_angles
from wsbatch.model.weights import check_quantisation, one_line, read_weights, revision, weight_files
from wsbatch.steps import ModelInfo
from wsbatch.text.tokenizer_files import TokenizerFiles, read_json, token_ids

_log = logging.getLogger("wsbatch.model")

# transformers' own annotations cover only a part of what is called here.
_hf: Any = transformers
_hf_logging: Any = transformers.utils.logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What a repository holds of use here: no other frameworks' weights, no subfolders.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, on its device, in eval mode and without gradients.

    Attributes:
        model: the transformers module.
        directory: where its config, weights and tokenizer files lie.
        info: what the engine needs to know.
    """

    model: Any
    directory: Path
    info: ModelInfo


def load(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    fused: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model. Call it on the thread that will run it.

    Args:
        model: a local directory of safetensors, a `.gguf` file (converted to bfloat16 once, in the user's cache),
            `demo`, or a Hugging Face id (fetched into the hub's cache). A directory called `demo` is `./demo`.
        dtype: float32, bfloat16, float16, or auto: bfloat16 where the hardware multiplies it natively, and where the
            fused runner will store weights in it and compute in float32; else float32.
        device: cpu, cuda, or auto: cuda where there is one.
        threads: of this thread's tensor operations; None leaves torch's choice.
        max_model_len: prompt plus output, in tokens; None is what the model was made for.
        fused: whether the fused runner (`fused.py`) will run the model, if it can.
        progress: called with (stage, done, total) while a model is fetched ("download", bytes) or converted
            ("convert", steps). Downloads from the hub draw the hub's own bars instead, and none without `progress`.

    Raises:
        ValueError: an argument is out of bounds, or the model is of a kind that cannot be served.
        OSError: files are missing, unreadable or damaged, or could not be fetched.
    """
    where = _device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of auto, {', '.join(DTYPES)}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads} is below 1")
        torch.set_num_threads(threads)

    directory = _locate(model, progress)
    with _quiet():
        config = _read_config(directory)
        kind, reason = _auto_dtype(where, config, fused) if dtype == "auto" else (dtype, "as asked for")
        longest = _max_model_len(config, max_model_len, directory)
        named_ends = _named_ends(directory)
        module = read_weights(directory, DTYPES[kind]).to(where)
    size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in module.parameters())
    _log.info("weights in %s, %s: %d MiB", kind, reason, size_bytes >> 20)
    info = ModelInfo(
        name=model,
        revision=revision(directory),
        dtype=kind,
        device=where,
        max_model_len=longest,
        vocab_size=config.get_text_config(decoder=True).vocab_size,
        eos_token_ids=named_ends | _stated_ends(module, directory),
    )
    return LoadedModel(model=module, directory=directory, info=info)


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is none of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device='cuda', but torch {torch.__version__} sees no CUDA device")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _auto_dtype(device: str, config: Any, fused: bool) -> tuple[str, str]:
    """The dtype that is fastest here, and why."""
    if device == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if native:
        return "bfloat16", "which the hardware multiplies"
    if device == "cpu" and fused:
        try:
            check_config(config, LANES)
            find_compiler()
            return (
                "bfloat16",
                "computed in float32, for half the memory to read (docs/kernels.md)",
            )
        except KernelsUnavailable:
            pass
    return "float32", "for bfloat16 would be emulated"


def _locate(model: str, progress: Progress | None) -> Path:
    """The local directory that holds the model, fetched or converted first where needed."""
    if model == "demo":
        return fetch_demo(progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model {model!r}: there is no such file")
        return from_gguf(path, progress)
    if path.exists():
        raise ValueError(f"model {model!r} is a file, but neither a directory nor a .gguf file")
    if path.is_absolute() or model.startswith((".", "~")):
        raise FileNotFoundError(f"model {model!r}: there is no such directory")
    try:
        with contextlib.nullcontext() if progress else _quiet():
            found = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"])
    except HFValidationError as error:
        raise ValueError(f"model {model!r} is no directory, no .gguf file and no Hugging Face id: {error}") from error
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise OSError(f"model {model!r} is no local directory, and the hub could not provide it: {reason}") from error
    return Path(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and warnings; what mattered among them is checked here and raised."""
    level, bars = _hf_logging.get_verbosity(), _hf_logging.is_progress_bar_enabled()
    _hf_logging.set_verbosity_error()
    _hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        _hf_logging.set_verbosity(level)
        if bars:
            _hf_logging.enable_progress_bar()


def _read_config(directory: Path) -> Any:
    """The model's configuration, refused unless it is that of a causal language model."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json")
    weight_files(directory)
    read_json(path)  # names the file where it is none
    try:
        config = _hf.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        decoder = config.get_text_config(decoder=True)
    except Exception as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
    if not isinstance(decoder, transformers.PretrainedConfig):
        raise ValueError(f"{path}: the decoder's configuration must be an object, not {decoder!r:.80}")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{path} is of an encoder-decoder ({config.model_type}); only decoders are served")
    if type(config) not in _hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path} is of a {config.model_type}, which transformers has no causal LM for")
    expected, found = _hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__, config.architectures or []
    if not isinstance(found, list) or (found and expected not in found):
        raise ValueError(f"{path}: architectures is {found}: not a causal LM ({expected})")
    check_quantisation(config, path)
    return config


def _max_model_len(config: Any, asked: int | None, directory: Path) -> int:
    """What was asked for, or all that the model has positions for."""
    decoder = config.get_text_config(decoder=True)
    name = decoder.attribute_map.get("max_position_embeddings", "max_position_embeddings")  # GPT-2: n_positions
    bound = getattr(decoder, name, None)
    if bound is not None and (not isinstance(bound, int) or bound < 2):
        raise ValueError(f"{directory / 'config.json'}: {name} must be 2 at least, not {bound!r}")
    shared = shared_angles(decoder)
    if shared is not None and (bound is None or shared[0] < bound):
        bound, reason = (
            shared[0],
            f"beyond, the model's position encoding ({shared[1]}) depends on the longest row of a batch",
        )
        if asked is None:
            _log.warning("max_model_len is %d: %s", bound, reason)
        elif asked > bound:
            raise ValueError(f"max_model_len={asked} exceeds {bound}: {reason}")
    if bound is None:
        if asked is None:
            raise ValueError("max_model_len must be given: the model's config names no longest input")
        bound = asked
    if asked is None:
        return bound
    if asked < 2:
        raise ValueError(f"max_model_len={asked} is below 2: one token of prompt and one of output")
    if asked > bound:
        raise ValueError(f"max_model_len={asked} exceeds {name}={bound} of the model")
    return asked


def _named_ends(directory: Path) -> frozenset[int]:
    """The ids of the token that the tokenizer's files call the end of the sequence."""
    if not (directory / "tokenizer.json").is_file():
        return frozenset()
    files = TokenizerFiles.read(directory)
    return files.added_ids(files.names.get("eos_token"))


def _stated_ends(module: Any, directory: Path) -> frozenset[int]:
    """Every id that the generation config or the config calls the end of the sequence."""
    decoder = module.config.get_text_config(decoder=True)
    return token_ids(module.generation_config.eos_token_id, directory) | token_ids(decoder.eos_token_id, directory)
