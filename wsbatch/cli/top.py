"""`wsbatch top`: the live batch in a terminal, or as plain lines in a pipe."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import trio

from wsbatch.cli.asking import DEFAULT_URL, add_connection_flags, dial, ending_with_its_error, on_interrupt
from wsbatch.cli.output import while_read, write
from wsbatch.cli.parsing import Commands, add_parser, say_error, text
from wsbatch.cli.printing import without_controls
from wsbatch.cli.settings import count
from wsbatch.cli.streams import UNREAD
from wsbatch.cli.timeline import GLYPHS, Timeline, numbers
from wsbatch.client import BatchWatch
from wsbatch.errors import ConnectionLost
from wsbatch.messages import BatchSnapshot

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

# Between two lines in a pipe, and between two tries to reach a server that was lost.
_LINE_S = 1.0
_RETRY_S = 2.0

_DESCRIPTION = """\
Show what a running server's batch does: a line for each slot, time running to the left. The server
must allow it (`--allow-watch`, or `wsbatch demo`). No prompt and no answer is ever shown.
In a pipe, or with --plain: one line of numbers a second. Ctrl-C ends it.
"""

_EPILOG = f"""\
examples:
  wsbatch top                           the server at {DEFAULT_URL}
  wsbatch top ws://127.0.0.1:8765
  wsbatch top --count 5 | cat           five lines of numbers

In the timeline: {GLYPHS["prefill"]} prefill, {GLYPHS["decode"]} decode,
{GLYPHS["kept"]} finished but kept by its batch, {GLYPHS["held"]} held without a part in the step; blank is idle.

exit statuses: 0 ended by Ctrl-C or --count; 1 an error, in one line on stderr; 2 bad usage;
{UNREAD} nobody reads stdout any more
"""


def add_command(commands: Commands) -> None:
    """Add `top` to the command line."""
    parser = add_parser(
        commands, "top", help="watch a running server's batch", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("address", type=text, nargs="?", metavar="URL", help="the server's address; the same as --url")
    parser.add_argument("--plain", action="store_true", help="lines of numbers, in a terminal too")
    parser.add_argument("--count", type=count, metavar="N", help="end after N snapshots; in a pipe, after N lines")
    add_connection_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Watch until the end; the exit status."""
    arguments.url = arguments.address or arguments.url
    with ending_with_its_error(), _view(plain=arguments.plain or not sys.stdout.isatty()) as view:
        trio.run(_watch, arguments, view)
    return 0


class _View(Protocol):
    """Where snapshots are shown. `interval_s` is how often; what comes in between is only taken in."""

    interval_s: float

    def take(self, snapshot: BatchSnapshot) -> None: ...

    async def show(self) -> None: ...

    def lost(self, error: ConnectionLost) -> None: ...


async def _watch(arguments: argparse.Namespace, view: _View) -> None:
    """Until Ctrl-C or `--count`; a server that was there once is waited for."""
    left: int | None = arguments.count
    connected = False
    with trio.CancelScope() as scope, on_interrupt(scope.cancel):
        async with while_read():
            while left != 0:
                try:
                    async with dial(arguments) as client, client.watch() as watch:
                        connected = True
                        left = await _show(watch, view, left)
                except ConnectionLost as error:
                    if not connected:
                        raise
                    view.lost(error)
                    await trio.sleep(_RETRY_S)


async def _show(watch: BatchWatch, view: _View, left: int | None) -> int | None:
    """Show the snapshots until `left` of them were shown; how many are left then. Raises ConnectionLost."""
    show_at_s = trio.current_time()
    async for snapshot in watch:
        view.take(snapshot)
        if trio.current_time() < show_at_s:
            continue
        show_at_s = trio.current_time() + view.interval_s
        await view.show()
        left = None if left is None else left - 1
        if left == 0:
            break
    return left


@contextmanager
def _view(*, plain: bool) -> Iterator[_View]:
    if plain:
        yield _Lines()
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        yield _Lines()
        return
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        yield _Screen(console, live)


class _Lines:
    """One line of numbers a second."""

    interval_s = _LINE_S

    def __init__(self) -> None:
        self._snapshot: BatchSnapshot | None = None

    def take(self, snapshot: BatchSnapshot) -> None:
        self._snapshot = snapshot

    async def show(self) -> None:
        assert self._snapshot is not None
        parts = [f"{name.replace(' ', '_')}={value}" for name, value in numbers(self._snapshot)]
        await write(f"t={self._snapshot.t_ms / 1000:.1f}s {' '.join(parts)}\n")

    def lost(self, error: ConnectionLost) -> None:
        say_error("wsbatch top", f"{error}; trying again")


# As in the browser page: told apart by every kind of colour vision.
_STYLES = {"prefill": "#e69f00", "decode": "#56b4e9", "kept": "#d55e00", "held": "dim", "idle": ""}


class _Screen:
    """The timeline on the whole screen."""

    interval_s = 0.0

    def __init__(self, console: "Console", live: "Live") -> None:
        self._console = console
        self._live = live
        self._timeline = Timeline()
        self._snapshot: BatchSnapshot | None = None
        self._note = ""

    def take(self, snapshot: BatchSnapshot) -> None:
        self._note = ""
        self._snapshot = snapshot
        self._timeline.take(snapshot)

    async def show(self) -> None:
        self._live.update(self._drawn(), refresh=True)

    def lost(self, error: ConnectionLost) -> None:
        self._note = without_controls(f"{error}; trying again")
        self._timeline = Timeline()
        self._live.update(self._drawn(), refresh=True)

    def _drawn(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        lines = []
        if self._snapshot is not None:
            head = Text()
            for name, value in numbers(self._snapshot):
                head.append(f"{name} ", "dim").append(f"{value}   ", "bold")
            lines += [head, Text()]
        shown = max(0, min(self._timeline.slots, self._console.height - 6))
        for slot, phases in enumerate(self._timeline.rows(max(1, self._console.width - 6))[:shown]):
            line = Text(f"{slot + 1:>4} ", "dim", no_wrap=True)
            for phase in phases:
                line.append(GLYPHS.get(phase, "?"), _STYLES.get(phase, ""))
            lines.append(line)
        legend = Text()
        for phase, style in _STYLES.items():
            legend.append(f"  {GLYPHS[phase]} ", style).append(phase, "dim")
        more = f"   {self._timeline.slots - shown} more slots" if shown < self._timeline.slots else ""
        return Group(*lines, Text(), legend.append(more, "dim"), Text(self._note, "bold red"))
