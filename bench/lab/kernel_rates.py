"""How near the kernels' products come to the processor's limit, at each level and in each format."""

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lab_tools.script import run_script, script_parser
from wsbatch.model import compiled
from wsbatch.model.levels import Level, available

_DESCRIPTION = """\
Multiply activations by weights with one thread, at every level that this machine has, through the routine that the
kernels use, for several numbers of rows. Prints a Markdown table: billions of products and sums a second (GMAC/s), and
beside them the most that the same instruction reaches in registers alone, which is the limit.
"""

_EPILOG = """\
example:
  nice -n -20 python bench/lab/kernel_rates.py
"""

_SOURCE = Path(__file__).with_suffix(".cpp")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with its status."""
    run_script(script_parser("kernel_rates", description=_DESCRIPTION, epilog=_EPILOG), _run, argv)


def _run(args: argparse.Namespace) -> int:
    lines: list[str] = []
    for level in available():
        for dtype, kind in level.formats.items():
            rates = _measure(level, kind)
            limit = rates.pop((0, 0))
            rows = sorted({rows for rows, _ in rates})
            if not lines:
                lines = [_cells("level", "weights", "limit", "panels", *rows), _cells(*["---"] * (4 + len(rows)))]
                print(*lines, sep="\n")
            for panels in sorted({panels for _, panels in rates}):
                figures = [f"{rates[count, panels]:.0f}" for count in rows]
                name = str(dtype).removeprefix("torch.")
                print(_cells(f"`{level.name}`", name, f"{limit:.0f}", panels, *figures), flush=True)
    return 0


def _cells(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _measure(level: Level, kind: str) -> dict[tuple[int, int], float]:
    """GMAC/s by rows of activations and panels of a task; the limit at (0, 0)."""
    # As for the library, but for the flags of one.
    flags = [flag for flag in (*compiled._FLAGS, *level.flags) if flag not in ("-fPIC", "-shared")]
    with tempfile.TemporaryDirectory(prefix="wsbatch-rates-") as scratch:
        program = f"{scratch}/kernel_rates"
        paths = [f"-I{compiled._SOURCES}", str(_SOURCE), "-o", program]
        subprocess.run([*compiled._compiler(), *flags, f"-DWSBATCH_FORMAT={kind}", *paths], check=True)
        printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    measured = (line.split() for line in printed.splitlines())
    return {(int(rows), int(panels)): float(rate) for rows, panels, rate in measured}


if __name__ == "__main__":
    main()
