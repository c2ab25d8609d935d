"""What is shown while a model is fetched and converted: bars on a terminal, lines elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID

_DOING = {"download": "Downloading the model", "convert": "Converting it, once"}
_LINE_PERCENT = 20


class LoadProgress(Protocol):
    """Called with (stage, done, total), from the model's thread."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was found. May be called more than once."""
        ...


@contextmanager
def load_progress() -> Iterator[LoadProgress]:
    """Bars where stderr is a terminal and rich is there; else a line for every fifth of a stage."""
    progress: LoadProgress = _Lines()
    if sys.stderr.isatty():
        with suppress(ImportError):
            progress = _Bars()
    else:
        # The hub's client draws bars of its own, for people.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        yield progress
    finally:
        progress.close()


class _Bars:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        if stage not in self._tasks:
            self._bars.start()
            self._tasks[stage] = self._bars.add_task(_DOING.get(stage, stage), total=total)
        self._bars.update(self._tasks[stage], completed=done)

    def close(self) -> None:
        self._bars.stop()


class _Lines:
    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        percent = 100 * done // total if total else 0
        if stage not in self._told or percent >= self._told[stage] + _LINE_PERCENT:
            self._told[stage] = percent - percent % _LINE_PERCENT
            print(f"{_DOING.get(stage, stage)}: {percent} %", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass
