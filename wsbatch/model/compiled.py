"""Compiles the C++ kernels at first use and loads them through ctypes; cached for the next start.

The kernels include nothing of Python or torch: they take pointers. So the compiler needs seconds, any torch works with
them, and a call holds no GIL. Only what a model needs is compiled: one dtype at one level (`levels.py`). Without a
compiler, `load_library` says why not.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from wsbatch.model.conversion import cache_dir
from wsbatch.model.kernel_cache import KernelCache
from wsbatch.model.levels import Level

_log = logging.getLogger("wsbatch.model")

_SOURCES = Path(__file__).parent / "kernels"
# No contraction of products and sums: a result must not depend on the loop that an expression stands in (lanes.cpp).
_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-w")
_SYMBOLS = ("wsbatch_create", "wsbatch_step", "wsbatch_choose", "wsbatch_destroy")
_COMPILE_TIMEOUT_S = 300.0


class KernelsUnavailable(RuntimeError):
    """The compiled kernels cannot be used here; the message says why."""


def load_library(dtype: torch.dtype, level: Level) -> ctypes.CDLL:
    """The kernels for models of this dtype (bfloat16 or float32), compiled if need be: about ten seconds, once.

    Args:
        dtype: of the model's weights.
        level: what the machine has; one of `levels.available()`.

    They are kept in the user's cache (`KernelCache`); where that cannot be used, they are compiled at each start.

    Raises KernelsUnavailable, naming what is missing.
    """
    if sys.platform not in ("linux", "darwin"):
        raise KernelsUnavailable(f"the kernels run on Linux and macOS, not on {sys.platform}")
    if dtype not in level.formats:
        raise KernelsUnavailable(f"no kernels for {dtype}")
    compiler = find_compiler()
    flags = (*_FLAGS, *level.flags, f"-DWSBATCH_FORMAT={level.formats[dtype]}")
    try:
        key = _key(compiler, flags, sorted(_SOURCES.glob("*.cpp")))
        cache = _cache()
        for path in cache.find(key) if cache is not None else ():
            with suppress(OSError, AttributeError):  # sound, but not what this machine loads
                return _load(path)
        return _build([*compiler, *flags], cache, key)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the kernels could not be compiled or loaded: {error}") from error


def find_compiler() -> list[str]:
    """The command that compiles: a program, and what `CXX` gives it as flags. Raises KernelsUnavailable."""
    for candidate in (os.environ.get("CXX", ""), "g++", "clang++"):
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise KernelsUnavailable(f"CXX={candidate!r} cannot be read: {error}") from error
        if words and shutil.which(words[0]):
            return words
        if words and candidate == os.environ.get("CXX"):
            _log.warning("CXX=%r names no program; g++ and clang++ are tried", candidate)
    raise KernelsUnavailable("no C++ compiler was found (CXX, g++, clang++)")


def _key(compiler: list[str], flags: tuple[str, ...], sources: list[Path]) -> str:
    """Changes with anything that could change the binary. The level's flags say what a processor needs to run it."""
    digest = hashlib.sha256(_run([*compiler, "--version"]).encode())
    digest.update(repr((compiler, flags)).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _cache() -> KernelCache | None:
    try:
        return KernelCache(cache_dir() / "kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.warning("the kernels cannot be kept for the next start: %s", error)
        return None


def _build(command: list[str], cache: KernelCache | None, key: str) -> ctypes.CDLL:
    _log.info("compiling the kernels, once, in about ten seconds: %s", shlex.join(command))
    with tempfile.TemporaryDirectory(prefix="wsbatch-kernels-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "step.so"
        _run([*command, str(_SOURCES / "step.cpp"), "-o", str(path)])
        if cache is not None:
            try:
                path = cache.keep(path, key)
            except OSError as error:
                _log.warning("the kernels cannot be kept for the next start: %s", error)
        return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    """Raises OSError where the system does not load it, AttributeError where it is not the kernels."""
    library = ctypes.CDLL(str(path))
    for symbol in _SYMBOLS:
        getattr(library, symbol)
    return library


def _run(command: list[str]) -> str:
    """What a command prints. Raises OSError where it fails, TimeoutExpired where it takes too long."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # what it starts (a compiler is several programs) can then be ended with it
    )
    with process:
        try:
            printed, complaint = process.communicate(timeout=_COMPILE_TIMEOUT_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise OSError(f"{shlex.join(command[:1])} failed: {complaint.strip()[-500:]}")
    return printed
