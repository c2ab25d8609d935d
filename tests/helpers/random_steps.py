"""Builds and runs `tests/model/random_steps.cpp`: the kernels in a program of their own."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from wsbatch.model import compiled
from wsbatch.model.levels import Level

KERNELS = Path(compiled.__file__).parent / "kernels"
SOURCE = Path(__file__).parents[1] / "model" / "random_steps.cpp"
LANGUAGE = tuple(flag for flag in compiled._FLAGS if flag not in ("-O3", "-fPIC", "-shared"))
"""What the kernels are compiled with, but for what makes them a library, and how far the compiler optimises."""


def build(compiler: Sequence[str], level: Level, dtype: torch.dtype, program: Path, *flags: str) -> None:
    """Compile `random_steps.cpp` for a level and the format of a dtype into the file `program`."""
    chosen = (*LANGUAGE, *level.flags, f"-DWSBATCH_FORMAT={level.formats[dtype]}", f"-I{KERNELS}", *flags)
    compile_with([*compiler, *chosen, str(SOURCE), "-o", str(program)])


def compile_with(command: list[str]) -> None:
    """Run a compiler; the test fails with what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:5000]


def run(command: list[str], models: int) -> list[str]:
    """The best ids of the first models, a line each."""
    done = subprocess.run([*command, "0", str(models)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:5000]
    *lines, last = done.stdout.splitlines()
    assert last == f"{models} models"
    assert len(lines) == models
    return lines
