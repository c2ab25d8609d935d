"""Compiles the C++ kernels at first use and loads them through ctypes; cached for the next start.

The kernels include nothing of Python or torch: they take pointers. So the compiler needs seconds, any torch works with
them, and a call holds no GIL. Without a compiler, or on a processor without AVX-512, `load_library` says why not.
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

_log = logging.getLogger("wsbatch.model")

_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-w")
_SYMBOLS = ("wsbatch_create", "wsbatch_step", "wsbatch_destroy")
_COMPILE_TIMEOUT_S = 300.0


class KernelsUnavailable(RuntimeError):
    """The compiled kernels cannot be used here; the message says why."""


def load_library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for models of this dtype (bfloat16 or float32), compiled if need be: about ten seconds, once.

    They are kept in the user's cache (`KernelCache`); where that cannot be used, they are compiled at each start.

    Raises KernelsUnavailable, naming what is missing.
    """
    _check_machine(dtype)
    compiler = _compiler()
    try:
        key = _key(compiler, sorted(_SOURCES.glob("*.cpp")))
        cache = _cache()
        for path in cache.find(key) if cache is not None else ():
            with suppress(OSError, AttributeError):  # sound, but not what this machine loads
                return _load(path)
        return _build(compiler, cache, key)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the kernels could not be compiled or loaded: {error}") from error


def _check_machine(dtype: torch.dtype) -> None:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"the kernels run on Linux, not on {sys.platform}")
    needed = {torch.float32: ("avx512_f",), torch.bfloat16: ("avx512_f", "avx512_bf16")}.get(dtype)
    if needed is None:
        raise KernelsUnavailable(f"no kernels for {dtype}")
    capabilities = torch.cpu.get_capabilities()
    missing = [name for name in needed if not capabilities.get(name)]
    if missing:
        raise KernelsUnavailable(f"this processor lacks {', '.join(missing)}")


def _compiler() -> list[str]:
    """The command that compiles: a program, and what `CXX` gives it as flags."""
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


def _key(compiler: list[str], sources: list[Path]) -> str:
    """Changes with anything that could change the binary or where it runs: `-march=native` makes that the CPU too."""
    digest = hashlib.sha256(_run([*compiler, "--version"]).encode())
    digest.update(repr((compiler, _FLAGS, _processor())).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What the processor can do: machines of several kinds may share a home directory."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return line
    return repr(sorted(torch.cpu.get_capabilities().items()))


def _cache() -> KernelCache | None:
    try:
        return KernelCache(cache_dir() / "kernels")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        _log.warning("the kernels cannot be kept for the next start: %s", error)
        return None


def _build(compiler: list[str], cache: KernelCache | None, key: str) -> ctypes.CDLL:
    _log.info("compiling the kernels with %s", shlex.join(compiler))
    with tempfile.TemporaryDirectory(prefix="wsbatch-kernels-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch) / "step.so"
        _run([*compiler, *_FLAGS, str(_SOURCES / "step.cpp"), "-o", str(path)])
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
