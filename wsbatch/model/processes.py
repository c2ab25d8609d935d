"""Python in a process of its own."""

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `python -m module`, without what `-m` alone adds: the working directory, first on the
    path, so that a `torch.py` or `json.py` that lies there would run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def keep_working_directory_off_paths() -> None:
    """The same for what other modules start from here on: `multiprocessing` runs `python -c`, which adds it, too."""
    os.environ["PYTHONSAFEPATH"] = "1"
