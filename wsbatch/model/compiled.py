"""Compiles the C++ kernels at first use and loads them through ctypes; cached for the next start.

The kernels include nothing of Python or torch: they take pointers. So the compiler needs seconds, any torch works with
them, and a call holds no GIL. Without a compiler, or on a processor without AVX-512, `load_library` says why not.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_log = logging.getLogger("wsbatch.model")

_SOURCES = Path(__file__).parent / "kernels"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-w")
_COMPILE_TIMEOUT_S = 300


class KernelsUnavailable(RuntimeError):
    """The compiled kernels cannot be used here; the message says why."""


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wsbatch" / "kernels"


def _key(compiler: str, sources: list[Path]) -> str:
    """Changes with anything that could change the binary or where it runs: `-march=native` makes that the CPU too."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
    digest = hashlib.sha256(version.stdout)
    digest.update(repr((_FLAGS, sorted(torch.cpu.get_capabilities().items()))).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def load_library(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels for models of this dtype (bfloat16 or float32), compiled if need be: about ten seconds, once.

    Raises KernelsUnavailable, naming what is missing.
    """
    capabilities = torch.cpu.get_capabilities()
    needed = {torch.float32: ("avx512_f",), torch.bfloat16: ("avx512_f", "avx512_bf16")}.get(dtype)
    if needed is None:
        raise KernelsUnavailable(f"no kernels for {dtype}")
    missing = [name for name in needed if not capabilities.get(name)]
    if missing:
        raise KernelsUnavailable(f"this processor lacks {', '.join(missing)}")
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelsUnavailable("no C++ compiler was found (CXX, g++, clang++)")
    sources = sorted(_SOURCES.glob("*.cpp"))
    try:
        target = _cache_dir() / f"step-{_key(compiler, sources)}.so"
        if not target.exists():
            _compile(compiler, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the kernels could not be compiled or loaded: {error}") from error


def _compile(compiler: str, target: Path) -> None:
    """Into a file of its own first: a server starting beside this one must never load half a library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        _log.info("compiling the kernels with %s into %s; the next start finds them there", compiler, target)
        command = [compiler, *_FLAGS, str(_SOURCES / "step.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        os.replace(made, target)
