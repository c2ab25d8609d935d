"""The kernels under the compiler's sanitizers: `random_steps.cpp`, where every buffer has exactly its size.

Needs a compiler with their libraries (Debian's g++ has them), and about two minutes.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from random_steps import build, run
from wsbatch.model.levels import choose

MODELS = 60
MEMORY = "-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize(
    ("sanitizers", "name", "dtype"),
    [
        (MEMORY, "auto", torch.bfloat16),
        (MEMORY, "avx2", torch.bfloat16),
        (MEMORY, "generic", torch.float32),
        ("-fsanitize=thread", "auto", torch.float32),
    ],
    ids=["memory, bfloat16", "memory, avx2, bfloat16", "memory, generic, float32", "thread"],
)
def test_random_steps(sanitizers: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    try:
        level = choose(name)
    except ValueError as error:
        pytest.skip(str(error))
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler was found (CXX, g++, clang++)")
    flags, empty = sanitizers.split(), tmp_path / "empty.cpp"
    empty.write_text("int main() { return 0; }\n")
    probe = str(tmp_path / "probe")
    command = [compiler, *flags, str(empty), "-o", probe]
    for attempt in (command, [probe]):
        tried = subprocess.run(attempt, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"{flags[0]} does not work here: {tried.stderr.strip()[-200:]}")
    program = tmp_path / "random_steps"
    build([compiler], level, dtype, program, "-O1", "-g", *flags)
    run([str(program)], MODELS)
