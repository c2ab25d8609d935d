"""Where a conversation's answers appear: plain text for pipes and bare installs, Markdown as it streams elsewhere."""

import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from wsbatch.cli.output import write
from wsbatch.cli.printing import printable, without_controls

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live


class Screen(Protocol):
    """Shows one answer after the other."""

    def begin(self) -> None:
        """An answer was asked for."""
        ...

    async def add(self, text: str) -> None:
        """More of it has come."""
        ...

    async def end(self) -> None:
        """That was all of it. Does nothing where none was begun."""
        ...

    def note(self, text: str) -> None:
        """A line that is not part of any answer."""
        ...


def make_screen(*, plain: bool) -> Screen:
    """Markdown where stdout is a terminal that can show it and rich is installed; plain text elsewhere."""
    if not plain and sys.stdout.isatty():
        with suppress(ImportError):
            from rich.console import Console

            console = Console(highlight=False)
            if not console.is_dumb_terminal:
                return MarkdownScreen(console)
    return PlainScreen()


class PlainScreen:
    """Answers on stdout, notes on stderr; no escape codes."""

    def __init__(self) -> None:
        self._last = "\n"

    def begin(self) -> None:
        self._last = "\n"

    async def add(self, text: str) -> None:
        if text:
            self._last = text
            await write(text)

    async def end(self) -> None:
        if not self._last.endswith("\n"):
            self._last = "\n"
            await write("\n")

    def note(self, text: str) -> None:
        print(f"[{without_controls(text)}]", file=sys.stderr, flush=True)


class MarkdownScreen:
    """Finished blocks are printed for good; the one that is still growing is drawn anew as it does."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._live: Live | None = None
        self._growing = _Growing()

    def begin(self) -> None:
        from rich.live import Live

        self._growing = _Growing()
        self._live = Live(
            get_renderable=lambda: self._growing, console=self._console, refresh_per_second=10, transient=True
        )
        self._live.start()

    async def add(self, text: str) -> None:
        blocks, self._growing.text = finished_blocks(self._growing.text + printable(text))
        for block in blocks:
            self._print(block)

    async def end(self) -> None:
        if self._live is None:
            return
        live, self._live = self._live, None
        live.stop()
        if self._growing.text.strip():
            self._print(self._growing.text)

    def note(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"[{without_controls(text)}]", style="dim"))

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        self._console.print(Markdown(block))
        self._console.print()


class _Growing:
    """The unfinished block: its last lines where it is higher than the screen, since a terminal cannot redraw more."""

    def __init__(self) -> None:
        self.text = ""

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.markdown import Markdown
        from rich.segment import Segment
        from rich.spinner import Spinner

        if not self.text.strip():
            yield Spinner("dots")
            return
        lines = console.render_lines(Markdown(self.text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_CONTINUES = re.compile(r"[ \t]|[-*+] |\d+[.)] ")
_LONGEST_ITEM_MARK = 5  # "100. ": a shorter beginning may still become one


def finished_blocks(text: str) -> tuple[list[str], str]:
    """Split Markdown that is still growing: blocks that can no longer change, and the rest.

    A block ends at a blank line outside code fences, once a line follows that is neither indented nor a list's item:
    those may still belong to it.
    """
    blocks: list[str] = []
    start = position = 0
    fence = ""
    after_blank = False
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        known = line.endswith("\n") or len(line) > _LONGEST_ITEM_MARK
        if not fence and after_blank and known and line.strip() and not _CONTINUES.match(line):
            blocks.append(text[start:position])
            start = position
        if marker := _FENCE.match(line):
            if not fence:
                fence = marker[1]
            elif marker[1].startswith(fence):
                fence = ""
        after_blank = not fence and not line.strip()
        position += len(line)
    return blocks, text[start:]
