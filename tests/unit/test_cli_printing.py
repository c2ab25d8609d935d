"""What comes from a server, as it is printed: in an encoding that lacks it, on a terminal, in the log."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from wsbatch.cli import main
from wsbatch.cli.logs import LineFormatter
from wsbatch.cli.output import write, write_json
from wsbatch.cli.parsing import say_error
from wsbatch.cli.printing import printable_json
from wsbatch.cli.screen import MarkdownScreen, PlainScreen
from wsbatch.cli.timeline import numbers
from wsbatch.cli.top import _Screen
from wsbatch.errors import ConnectionLost
from wsbatch.messages import BatchSnapshot

HOSTILE = "\x1b]0;gotcha\x07\x9b2J\r"
CONTROLS = {chr(number) for number in [*range(0x20), *range(0x7F, 0xA0)]} - {"\n", "\t"}


@contextmanager
def stdout_in(encoding: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe as stdout; its reading end."""
    reading, writing = os.pipe()
    with open(writing, "w", encoding=encoding) as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        yield reading
    os.close(reading)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
async def test_frames_lose_nothing_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {"text": "é 안녕 🙂 \x9b"}
    with stdout_in(encoding, monkeypatch) as reading:
        await write_json(json.dumps(frame, ensure_ascii=False))
        line = os.read(reading, 1000).decode(encoding)
    assert json.loads(line) == frame
    assert ("é" in line) == (encoding != "ascii")


async def test_text_is_replaced_where_the_encoding_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with stdout_in("latin-1", monkeypatch) as reading:
        await write("é 안")
        assert os.read(reading, 1000) == b"\xe9 ?"


@given(st.text(st.characters(codec="utf-8")))
def test_frames_on_a_terminal_have_no_controls_and_say_the_same(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        shown = printable_json(json.dumps(text, ensure_ascii=False), "utf-8")
    assert json.loads(shown) == text
    assert not CONTROLS & set(shown)


async def test_what_a_server_says_never_operates_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say_error("wsbatch chat", ConnectionLost(f"closed: {HOSTILE}"))
    PlainScreen().note(f"{HOSTILE} at your service")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    await write(f"{HOSTILE} on ws://…\n")
    captured = capfd.readouterr()
    assert not CONTROLS & set(captured.out + captured.err)
    assert captured.err.count("\n") == 2


def test_bad_usage_is_one_line_without_controls_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["serve", f"--{HOSTILE}\nno flag"])
    captured = capsys.readouterr()
    assert exited.value.code == 2
    assert captured.err.startswith("wsbatch: unrecognized arguments")
    assert not CONTROLS & set(captured.err)
    assert captured.err.count("\n") == 1


def test_what_a_server_says_is_drawn_without_controls() -> None:
    console = Console(width=80, height=24, force_terminal=False, highlight=False)
    snapshot = BatchSnapshot(600.0, f"dyn\n{HOSTILE}", 1, 0, 0, 0.0, ())  # type: ignore[arg-type]
    screen = _Screen(console, Live(console=console, auto_refresh=False))
    with console.capture() as drawn:
        MarkdownScreen(console).note(HOSTILE)
        screen.take(snapshot)
        screen._note = ""
        screen.lost(ConnectionLost(HOSTILE))
        console.print(screen._drawn())
    assert not CONTROLS & set(drawn.get() + numbers(snapshot)[0][1])
    assert "\n" not in numbers(snapshot)[0][1]


def test_a_log_line_is_one_line_of_bounded_length() -> None:
    formatter = LineFormatter("%(levelname)s %(message)s")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        caught = sys.exc_info()
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "refused: %s", (f"{HOSTILE}\nERROR forged",), caught)
    line, *traceback = formatter.format(record).split("\n")
    assert line == r"WARNING refused: \x1b]0;gotcha\x07\x9b2J\x0d\x0aERROR forged"
    assert traceback[0] == "Traceback (most recent call last):"
    assert not CONTROLS & set("".join(traceback))
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "x" * 10_000_000, (), None)
    assert len(formatter.format(record)) < 3000
