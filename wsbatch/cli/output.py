"""Text on its way to stdout, and how fast it came."""

import os
import sys
from contextlib import suppress

import trio

from wsbatch.client import TokenStream
from wsbatch.messages import Event, Finished, Tokens


async def write(text: str) -> None:
    """Write to stdout without holding up the event loop: a reader that pauses (a pager) must not cost the connection.

    Raises BrokenPipeError once nobody reads.
    """
    # Not through sys.stdout: a thread that is blocked in there, and abandoned, would hold a lock that the interpreter
    # needs at its end.
    data = text.encode(sys.stdout.encoding, "replace")
    await trio.to_thread.run_sync(_write_all, sys.stdout.fileno(), data, abandon_on_cancel=True)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# All controls but tab and newline: a model that writes escape codes must not operate the reader's terminal.
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)], "\ufffd")


def printable(text: str) -> str:
    """The text as a terminal may be shown it; untouched where stdout is none."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def reader_is_gone() -> None:
    """After BrokenPipeError: keep the interpreter's last flush from failing, too."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
            await write(printable(text))
    assert isinstance(event, Finished)
    if end_line and not text.endswith("\n"):
        await write("\n")
    return event, pace
