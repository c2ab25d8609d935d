"""What is built once and kept in the user's cache: GGUF files as safetensors directories.

The conversion runs in a process of its own (`python -m wsbatch.model.conversion`): it needs several times the model's
memory, draws progress bars that no setting silences, and holds the GIL for seconds, which an event loop would feel.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from filelock import FileLock

from wsbatch.model.processes import module_command

# Called with (stage, done, total): "download" in bytes, "convert" in steps.
Progress: TypeAlias = Callable[[str, int, int], None]

_STEPS = 3

# Raised when conversions come to hold something else: those that are in the cache are then made anew.
_FORMAT = 2

# The name that llama.cpp gives to each part of a split model.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def cache_dir() -> Path:
    """Where built models are kept: $WSBATCH_CACHE, else `wsbatch` in $XDG_CACHE_HOME or the platform's cache.

    Raises:
        OSError: no home directory is known, or WSBATCH_CACHE is set and empty.
    """
    chosen = os.environ.get("WSBATCH_CACHE")
    if chosen == "":
        raise OSError("WSBATCH_CACHE is empty: give it a directory, or leave it unset")
    try:
        return Path(chosen).expanduser() if chosen is not None else _platform_cache()
    except RuntimeError as error:  # of pathlib: neither $HOME nor an entry for the user
        raise OSError(f"there is no place to keep models: {error} $WSBATCH_CACHE can name one") from error


def _platform_cache() -> Path:
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
        OSError: there is no place for the cache, or it cannot be written; or whatever `build` raises.
    """
    target = cache_dir() / name
    try:
        return target if target.is_dir() else _built(target, build)
    except (OSError, NotImplementedError) as error:  # the latter of FileLock: a file system without locks
        if isinstance(error, OSError) and error.errno is None:  # in words already
            raise
        where = f"{target.parent} ($WSBATCH_CACHE chooses another place)"
        raise OSError(f"cannot keep models in {where}: {error}") from error


def _built(target: Path, build: Callable[[Path], Path]) -> Path:
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


def parts(path: Path) -> list[Path]:
    """All files of the model that the file at `path` belongs to, in order: itself, unless its name is a part's.

    Raises:
        FileNotFoundError: parts are missing; the message lists them.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}" for number in range(1, count + 1)]
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise FileNotFoundError(f"{path} is one of {count} parts, of which are missing: {', '.join(missing)}")
    return [path.parent / name for name in names]


def from_gguf(path: Path, progress: Progress | None) -> Path:
    """The safetensors directory for a GGUF file, converted on first use; a changed file is converted anew.

    The file is known by its path, size and time of change, and so are all parts of a split one: hashing gigabytes at
    every start would cost more than a second conversion of a file that moved. The weights become bfloat16, finer than
    every quantised format.

    Raises:
        OSError: parts are missing, or the file cannot be converted; the message carries the reason.
    """
    stats = [(part, part.stat()) for part in parts(path.resolve())]
    facts = [f"{part}\0{stat.st_size}\0{stat.st_mtime_ns}" for part, stat in stats]
    identity = hashlib.sha256("\0".join([str(_FORMAT), *facts]).encode()).hexdigest()
    return cached(f"{path.stem}-{identity[:16]}", lambda scratch: convert(path, scratch / "model", progress))


def convert(source: Path, target: Path, progress: Progress | None) -> Path:
    """Write the model and tokenizer of the GGUF file `source` to the directory `target`, and return it.

    Raises:
        OSError: parts are missing, or the converting process failed; the message carries the end of what it said.
    """
    command = module_command(__name__, str(target), *map(str, parts(source)))
    path = os.pathsep.join(filter(None, sys.path))  # an empty entry is the working directory, whatever lies there
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": path}
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
    if process.returncode < 0:
        raise OSError(f"cannot convert {source}: signal {-process.returncode} ended the conversion")
    if process.returncode:
        reason = "".join(said).strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        raise OSError(f"cannot convert {source}: {reason}")
    return target


def _convert_here(target: Path, paths: list[Path]) -> None:
    """The work itself, in the child process: one line `step N` as each of the steps is done; a reason at the end."""
    # Here, because a server that converts nothing should not wait for it.
    from wsbatch.model.gguf.checkpoint import write_checkpoint

    print("step 0", flush=True)
    try:
        for step, _ in enumerate(write_checkpoint(paths, target), start=1):
            print(f"step {step}", flush=True)
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes of its readers: one line that says so
        reason = str(error) if isinstance(error, (ValueError, OSError)) else repr(error)
        sys.exit(" ".join(reason.split()) or repr(error))


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
