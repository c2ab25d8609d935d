"""The kernels by other compilers and for other processors than this machine's.

NEON is cross-compiled and run under an emulator: Debian's g++-aarch64-linux-gnu and qemu-user. Clang compiles every
level of this machine's architecture, and checks NEON's source for Apple. What runs must choose the tokens that plain
C++ (level generic) chooses.
"""

import functools
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from random_steps import KERNELS, LANGUAGE, build, compile_with, run
from wsbatch.model.levels import LEVELS, Level, choose

MODELS = 20
NEON = next(level for level in LEVELS if level.name == "neon")
HERE = [level for level in LEVELS if not level.machines or platform.machine().lower() in level.machines]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
CROSS = "aarch64-linux-gnu-g++"


def need(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} was not found (Debian's {package})")
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], list[str]]:
    """The best ids that level generic chooses in a dtype, compiled by g++."""

    @functools.cache
    def best_ids(dtype: torch.dtype) -> list[str]:
        program = tmp_path_factory.mktemp("plain") / "random_steps"
        build([need("g++", "g++")], choose("generic"), dtype, program, "-O3")
        return run([str(program)], MODELS)

    return best_ids


@DTYPES
@pytest.mark.parametrize("compiler", [(CROSS,), ("clang++", "--target=aarch64-linux-gnu")], ids=["gcc", "clang"])
def test_neon_chooses_the_tokens_of_plain_cpp(
    compiler: tuple[str, ...], dtype: torch.dtype, plain: Callable[[torch.dtype], list[str]], tmp_path: Path
) -> None:
    emulator = need("qemu-aarch64", "qemu-user")
    need(CROSS, "g++-aarch64-linux-gnu")  # Clang takes its headers, libraries and linker
    need(compiler[0], "clang")
    program = tmp_path / "random_steps"
    build(compiler, NEON, dtype, program, "-O3", "-static")
    assert run([emulator, str(program)], MODELS) == plain(dtype)


@pytest.mark.parametrize("level", HERE, ids=[level.name for level in HERE])
def test_clang_computes_what_gcc_does(level: Level, plain: Callable[[torch.dtype], list[str]], tmp_path: Path) -> None:
    """In bfloat16, whose format holds float32's inner product."""
    program = tmp_path / "random_steps"
    build([need("clang++", "clang")], level, torch.bfloat16, program, "-O3")
    if (reason := level.missing()) is not None:
        pytest.skip(f"compiled, and not run: {reason}")
    assert run([str(program)], MODELS) == plain(torch.bfloat16)


@DTYPES
def test_clang_takes_the_source_for_apple(dtype: torch.dtype) -> None:
    """As far as that goes without Apple's headers: Linux's stand in for them, so nothing is generated."""
    clang, cross = need("clang++", "clang"), need(CROSS, "g++-aarch64-linux-gnu")
    asked = subprocess.run([cross, "-E", "-v", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True)
    listed = asked.stderr.partition("<...> search starts here:\n")[2].partition("End of search list")[0].split()
    found = [str(Path(path).resolve()) for path in listed]
    headers = [path for path in found if "/gcc-cross/" not in path]  # Clang has its own of what lies there
    compile_with(
        [
            *(clang, "--target=arm64-apple-macos11", "-fsyntax-only", "-nostdinc++", *LANGUAGE, *NEON.flags),
            # Apple's clang defines one, Linux's the other; Linux's headers need it so.
            *("-U__nonnull", "-D_GNU_SOURCE"),
            *(flag for path in headers for flag in ("-isystem", path)),
            f"-DWSBATCH_FORMAT={NEON.formats[dtype]}",
            str(KERNELS / "step.cpp"),
        ]
    )
