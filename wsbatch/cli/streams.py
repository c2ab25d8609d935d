"""The standard streams as they are found: closed, full, with nobody at the other end, in an encoding that holds little.

One mechanism for every command: a closed number is taken, so that no socket or file gets it; what stderr cannot take is
dropped; and what stdout cannot take is one exception, `OutputLost`, which no handler of a connection's errors catches.
"""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from wsbatch.cli.parsing import FAILED, say_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTERRUPTED = 130
UNREAD = 141
"""Exit status where stdout's reader has left: what a shell says of a program that SIGPIPE ended."""


class OutputLost(Exception):
    """Stdout cannot be written to.

    Attributes:
        status: the exit status for it.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write to stdout: {error.strerror or error}")
        self.status = UNREAD if isinstance(error, BrokenPipeError) else FAILED


def run_command(program: str, act: Callable[[], int]) -> int:
    """Run a command over whatever the standard streams are; its exit status.

    Where stdout's reader has left that is 141, without a word; where stdout takes nothing for another reason, it is 1,
    and `program` says so on stderr.
    """
    with _standard_streams():
        try:
            try:
                return act()
            except KeyboardInterrupt:
                return INTERRUPTED
            finally:
                sys.stdout.flush()
        except OutputLost as error:
            lost = error
        except BaseExceptionGroup as group:
            if group.split(KeyboardInterrupt)[1] is None:
                return INTERRUPTED
            if (found := _find(group)) is None:
                raise
            lost = found
        if lost.status != UNREAD:
            say_error(program, lost)
        return lost.status


def write_whole(descriptor: int, data: "ReadableBuffer") -> None:
    """Write all of it. Another program may have set the descriptor to not block: then this waits."""
    rest = memoryview(data).cast("B")
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def has_reader(descriptor: int) -> bool:
    """Whether somebody may still read what is written there; true where the system cannot tell."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are told in any case
    return not poll.poll(0)


def read_stdin() -> str:
    """All of stdin as text. Raises OSError where it cannot be read, ValueError where it is no text."""
    try:
        return sys.stdin.read()
    except OSError as error:
        raise unreadable(error) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin is not text in {error.encoding}: {error.reason} at byte {error.start}") from error


def unreadable(error: OSError) -> OSError:
    """The error of a read from stdin, with the name of the stream in it."""
    return OSError(f"cannot read stdin: {error.strerror or error}")


class _Stdout(FileIO):
    """Says once that it is lost; what is still buffered then goes nowhere."""

    _lost = False

    def write(self, data: "ReadableBuffer") -> int:
        size = memoryview(data).nbytes
        if not self._lost:
            try:
                write_whole(self.fileno(), data)
            except OSError as error:
                self._lost = True
                raise OutputLost(error) from error
        return size


class _Stderr(FileIO):
    """Never fails: a word to somebody who is not there must not cost the answer."""

    def write(self, data: "ReadableBuffer") -> int:
        with suppress(OSError):
            write_whole(self.fileno(), data)
        return memoryview(data).nbytes


@contextmanager
def _standard_streams() -> Iterator[None]:
    _take_closed_numbers()
    before = sys.stdin, sys.stdout, sys.stderr
    try:
        if sys.stdin is None:
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the process's own
        # Another stream (a test's, an embedder's) is left as it is.
        if sys.stdout is sys.__stdout__:
            sys.stdout = _wrapped(_Stdout(1, "w", closefd=False), sys.stdout, errors="replace")
        if sys.stderr is sys.__stderr__:
            sys.stderr = _wrapped(_Stderr(2, "w", closefd=False), sys.stderr, errors="backslashreplace")
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _take_closed_numbers() -> None:
    """Open 0, 1 and 2 where they are closed. Reading and writing fail as they would have, but for stderr, which takes
    everything."""
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            taken = os.open(os.devnull, flags)
            if taken != number:
                os.dup2(taken, number)
                os.close(taken)
            os.set_inheritable(number, True)


def _wrapped(raw: FileIO, like: TextIO | None, *, errors: str) -> TextIO:
    """Text over `raw`, with the encoding and the buffering of the stream that it stands in for."""
    if not isinstance(like, TextIOWrapper):
        return TextIOWrapper(BufferedWriter(raw), encoding="utf-8", errors=errors, line_buffering=True)
    # As Python itself has it: without any buffer where PYTHONUNBUFFERED asks for that.
    buffer: Any = raw if like.write_through else BufferedWriter(raw)
    return TextIOWrapper(
        buffer,
        encoding=like.encoding,
        errors=errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def _find(group: BaseExceptionGroup[BaseException]) -> OutputLost | None:
    for error in group.exceptions:
        found = _find(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, OutputLost):
            return found
    return None
