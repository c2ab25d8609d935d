"""Stdin's lines: whole, in order, also those that arrive while an answer comes."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from wsbatch.cli.lines import Lines


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.FileIO]:
    """The writing end of what stdin reads."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as stdin, open(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr("sys.stdin", stdin)
        yield writer


async def all_lines(lines: Lines) -> list[str]:
    found = []
    while (line := await lines.next()) is not None:
        found.append(line)
    return found


async def test_lines_come_whole_however_they_were_written(pipe: io.FileIO) -> None:
    lines = Lines()
    pipe.write("grüß".encode()[:3])

    async def write_the_rest() -> None:
        await trio.testing.wait_all_tasks_blocked()
        pipe.write("grüß dich\r\n\n  two\nlast".encode()[3:])
        pipe.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_the_rest)
        assert await all_lines(lines) == ["grüß dich", "", "two", "last"]
    assert await lines.next() is None  # and stays at the end


async def test_a_file_is_read_like_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # epoll refuses files.
    (tmp_path / "questions").write_text("one\ntwo\n")
    with (tmp_path / "questions").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert await all_lines(Lines()) == ["one", "two"]


async def test_stop_is_seen_during_an_answer_and_the_rest_is_kept(pipe: io.FileIO) -> None:
    lines = Lines()
    stopped = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.watch, stopped.set)
        pipe.write(b"typed ahead\n")
        await trio.testing.wait_all_tasks_blocked()
        assert not stopped.is_set()
        pipe.write(b"/stop\nnext\n")
        await stopped.wait()
        nursery.cancel_scope.cancel()
    pipe.close()
    assert await all_lines(lines) == ["typed ahead", "next"]


async def test_watching_loses_nothing_when_it_ends_before_a_line_does(pipe: io.FileIO) -> None:
    lines = Lines()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.watch, pytest.fail)
        pipe.write(b"half a ")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    pipe.write(b"line\n")
    pipe.close()
    assert await all_lines(lines) == ["half a line"]


async def test_watching_outlasts_the_end_of_input(pipe: io.FileIO) -> None:
    pipe.close()
    lines = Lines()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lines.watch, pytest.fail)
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        nursery.cancel_scope.cancel()
