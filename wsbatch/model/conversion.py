"""What is built once and kept in the user's cache: GGUF files as safetensors directories.

The conversion runs in a process of its own (`python -m wsbatch.model.conversion`): it needs several times the model's
memory, draws progress bars that no setting silences, and holds the GIL for seconds, which an event loop would feel.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

# Called with (stage, done, total): "download" in bytes, "convert" in steps.
Progress: TypeAlias = Callable[[str, int, int], None]

_STEPS = 4


def cache_dir() -> Path:
    """Where built models are kept: $WSBATCH_CACHE, else `wsbatch` in $XDG_CACHE_HOME or the platform's cache."""
    if chosen := os.environ.get("WSBATCH_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "wsbatch"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "wsbatch"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "wsbatch" / "cache"
    return Path.home() / ".cache" / "wsbatch"


def cached(name: str, build: Callable[[Path], Path]) -> Path:
    """The directory `name` in the cache, built at most once, whoever else asks at the same time.

    `build(scratch)` makes it anywhere under the empty directory `scratch` and returns it; it then appears under its
    name whole or not at all. A second process waits for the first; what a killed one left behind is cleared.

    Raises:
        OSError: the cache cannot be written, or whatever `build` raises.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        scratch = Path(f"{target}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            build(scratch).rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def from_gguf(path: Path, progress: Progress | None) -> Path:
    """The safetensors directory for a GGUF file, converted on first use; a changed file is converted anew.

    The file is known by its path, size and time of change: hashing gigabytes at every start would cost more than a
    second conversion of a file that moved. The weights become bfloat16, finer than every quantised format.

    Raises:
        OSError: transformers cannot read the file; the message carries its reason.
    """
    path = path.resolve()
    stat = path.stat()
    identity = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    return cached(f"{path.stem}-{identity[:16]}", lambda scratch: convert(path, scratch / "model", progress))


def convert(source: Path, target: Path, progress: Progress | None) -> Path:
    """Write the model and tokenizer of the GGUF file `source` to the directory `target`, and return it.

    Raises:
        OSError: the converting process failed; the message carries the end of what it said.
    """
    command = [sys.executable, "-m", __name__, str(source), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                word, _, number = line.strip().partition(" ")
                if word == "step" and progress is not None:
                    progress("convert", int(number), _STEPS)
                said.append(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = "".join(said).strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        raise OSError(f"cannot convert {source}: {reason}")
    return target


def _convert_here(source: Path, target: Path) -> None:
    """The work itself, in the child process: one line `step N` as each of the steps is done."""
    # Here, because a server that converts nothing should not wait for them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("step 0", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    print("step 1", flush=True)
    module: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,  # the dequantised values, rounded once
        quantization_config=GgufConfig(dequantize=True),
    )
    print("step 2", flush=True)
    module = module.to(torch.bfloat16)
    module.save_pretrained(target)
    print("step 3", flush=True)
    tokenizer.save_pretrained(target)
    print("step 4", flush=True)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
