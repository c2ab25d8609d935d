"""The levels that the kernels are compiled for: what a processor needs for each, and how it multiplies each dtype.

One source serves all of them (`kernels/lanes.cpp`). A level is a set of instructions, not a processor, so a library
that was compiled for it runs wherever they are. The levels are in order of speed: the first that fits is chosen.
"""

import platform
from dataclasses import dataclass

import torch

_STORED = {torch.float32: "F32", torch.bfloat16: "StoredBF16"}
_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions.

    Attributes:
        name: as in the setting.
        machines: what `platform.machine()` may be; any where empty.
        needs: what `torch.cpu.get_capabilities()` must have.
        flags: of the compiler.
        formats: the kernels' format (`kernels/formats.cpp`) for each dtype.
    """

    name: str
    machines: tuple[str, ...]
    needs: tuple[str, ...]
    flags: tuple[str, ...]
    formats: dict[torch.dtype, str]

    def missing(self) -> str | None:
        """What this machine lacks for the level, in words; None where it has everything."""
        machine = platform.machine().lower()
        if self.machines and machine not in self.machines:
            return f"this machine is {machine}, not {self.machines[0]}"
        capabilities = torch.cpu.get_capabilities()
        lacking = [name for name in self.needs if not capabilities.get(name)]
        return f"this processor lacks {', '.join(lacking)}" if lacking else None


_V3 = ("avx2", "fma3", "bmi2", "f16c")
_V4 = (*_V3, "avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
LEVELS = (
    Level(
        "avx512_bf16",
        _X86,
        (*_V4, "avx512_bf16"),
        ("-march=x86-64-v4", "-mavx512bf16"),
        {**_STORED, torch.bfloat16: "NativeBF16"},
    ),
    Level("avx512", _X86, _V4, ("-march=x86-64-v4",), _STORED),
    Level("avx2", _X86, _V3, ("-march=x86-64-v3",), _STORED),
    Level("neon", _ARM, (), ("-march=armv8-a",), _STORED),
    Level("generic", (), (), (), _STORED),
)


def available() -> tuple[Level, ...]:
    """The levels that this machine has, the fastest first. `generic` is always among them."""
    return tuple(level for level in LEVELS if level.missing() is None)


def choose(name: str) -> Level:
    """The level of this name; auto: the fastest that this machine has.

    Raises ValueError where there is no such level, or this machine lacks what it needs.
    """
    if name == "auto":
        return available()[0]
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        raise ValueError(f"kernel_level={name!r} is none of auto, {', '.join(level.name for level in LEVELS)}")
    if (reason := level.missing()) is not None:
        raise ValueError(f"kernel_level={name!r} cannot run: {reason}")
    return level
