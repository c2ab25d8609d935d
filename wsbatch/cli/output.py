"""Text on its way to stdout, and how fast it came."""

import errno
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from wsbatch.cli.printing import printable, printable_json
from wsbatch.cli.streams import OutputLost, has_reader, write_whole
from wsbatch.client import TokenStream
from wsbatch.messages import Event, Finished, Tokens
from wsbatch.nurseries import background_tasks

# Between two looks at whether anybody reads stdout.
_LOOK_S = 0.5


async def write(text: str) -> None:
    """Write text to stdout without holding up the event loop: a reader that pauses (a pager) must not cost the
    connection. A terminal gets it without control characters. Raises OutputLost.
    """
    await _write(printable(text).encode(sys.stdout.encoding, "replace"))


async def write_json(line: str) -> None:
    """Write a line of JSON to stdout; see `write`. What the stream cannot hold is escaped, and not lost."""
    encoding = sys.stdout.encoding
    await _write(printable_json(line + "\n", encoding).encode(encoding))


async def _write(data: bytes) -> None:
    # Not through sys.stdout: a thread that is blocked in there, and abandoned, would hold a lock that the interpreter
    # needs at its end.
    try:
        await trio.to_thread.run_sync(write_whole, sys.stdout.fileno(), data, abandon_on_cancel=True)
    except OSError as error:
        raise OutputLost(error) from error


@asynccontextmanager
async def while_read() -> AsyncIterator[None]:
    """Run the block while somebody reads stdout; raises OutputLost once nobody does, also where nothing is written."""
    unread = False

    async def look() -> None:
        nonlocal unread
        while has_reader(sys.stdout.fileno()):  # noqa: ASYNC110 - nothing tells when it changes
            await trio.sleep(_LOOK_S)
        unread = True
        nursery.cancel_scope.cancel()

    async with background_tasks() as nursery:
        nursery.start_soon(look)
        yield
    if unread:
        raise OutputLost(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))


class Pace:
    """How fast one answer came, as its reader saw it. Made when it is asked for."""

    def __init__(self) -> None:
        self._asked_s = trio.current_time()
        self._first_s: float | None = None
        self._last_s = self._asked_s
        self._first_tokens = 0
        self._tokens = 0

    def note(self, event: Event) -> None:
        """Take an event, as it arrives."""
        now_s = trio.current_time()
        match event:
            case Tokens():
                if self._first_s is None:
                    self._first_s, self._first_tokens = now_s, len(event.token_ids)
                self._tokens += len(event.token_ids)
                self._last_s = now_s
            case Finished():
                self._tokens = event.usage.completion_tokens

    def __str__(self) -> str:
        """Tokens, time to first token (TTFT), and tokens a second from the first on."""
        if self._first_s is None:
            return "no tokens"
        parts = [
            f"{self._tokens} token{'s' if self._tokens != 1 else ''}",
            f"TTFT {self._first_s - self._asked_s:.2f} s",
        ]
        if self._last_s > self._first_s:
            parts.append(f"{(self._tokens - self._first_tokens) / (self._last_s - self._first_s):.1f} tokens/s")
        return ", ".join(parts)


async def write_text(stream: TokenStream, *, end_line: bool) -> tuple[Finished, Pace]:
    """Write the stream's text as it comes, and the end of its last line if asked to. Raises what iterating raises."""
    pace = Pace()
    text = "\n"
    async for event in stream:
        pace.note(event)
        if isinstance(event, Tokens | Finished) and event.text:
            text = event.text
            await write(text)
    assert isinstance(event, Finished)
    if end_line and not text.endswith("\n"):
        await write("\n")
    return event, pace
