"""Lines from stdin without holding up the event loop: from a pipe or a file, or typed with history and editing."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from wsbatch.cli.streams import unreadable

STOP = "/stop"
PROMPT = "> "

_READ_BYTES = 65_536
_MOST_AHEAD = 1000


class Lines:
    """Stdin's lines, in order."""

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._partial = b""
        self._ahead: deque[str] = deque()
        self._at_end = False

    async def next(self) -> str | None:
        """Wait for the next line; None at the end."""
        while not self._ahead:
            if self._at_end:
                return None
            await self._read()
        return self._ahead.popleft()

    async def watch(self, stop: Callable[[], object]) -> None:
        """While an answer comes: call `stop` when `/stop` is read. Other lines are kept for `next`. To be cancelled."""
        while not self._at_end and len(self._ahead) < _MOST_AHEAD:
            await self._read()
            if STOP in self._ahead:
                self._ahead.remove(STOP)
                stop()
        await trio.sleep_forever()

    async def _read(self) -> None:
        try:
            data = await self._receive()
        except OSError as error:
            raise unreadable(error) from error
        *whole, self._partial = (self._partial + data).split(b"\n")
        if not data:
            self._at_end = True
            if self._partial:
                whole.append(self._partial)
        self._ahead += [line.decode(sys.stdin.encoding, "replace").strip() for line in whole]

    async def _receive(self) -> bytes:
        if os.name != "posix":
            return await trio.to_thread.run_sync(os.read, self._descriptor, _READ_BYTES, abandon_on_cancel=True)
        # Rather than a thread, which would go on reading, and lose the line, after this was cancelled.
        with suppress(PermissionError):  # from epoll: a file is always ready
            await trio.lowlevel.wait_readable(self._descriptor)
        return os.read(self._descriptor, _READ_BYTES)


class TypedLines(Lines):
    """Lines typed at a prompt, with history and editing where Python has readline."""

    def __init__(self) -> None:
        super().__init__()
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` uses it once it is loaded

    async def next(self) -> str | None:
        """Prompt, and wait for the next line; None at the end (Ctrl-D)."""
        if self._ahead:
            print(PROMPT + self._ahead[0])
            return self._ahead.popleft()
        try:
            line = await trio.to_thread.run_sync(input, PROMPT, abandon_on_cancel=True)
        except EOFError:
            print()
            return None
        return line.strip()

    async def watch(self, stop: Callable[[], object]) -> None:
        """See `Lines.watch`. What is typed meanwhile is not shown: it would run into the answer."""
        with _no_echo(self._descriptor):
            await super().watch(stop)


def typed_so_far() -> str:
    """What stands at the prompt."""
    with suppress(ImportError):
        import readline

        return readline.get_line_buffer()
    return ""


@contextmanager
def terminal_restored() -> Iterator[None]:
    """Leave the terminal as it was found, also when readline was in the middle of a line."""
    try:
        import termios

        before = termios.tcgetattr(sys.stdin.fileno())
    except (ImportError, OSError, termios.error):
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)


@contextmanager
def _no_echo(descriptor: int) -> Iterator[None]:
    try:
        import termios
    except ImportError:
        yield
        return
    before = termios.tcgetattr(descriptor)
    silent = list(before)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
