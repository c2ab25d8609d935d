"""Markdown while it streams: what is printed for good can no longer change."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from wsbatch.cli.screen import MarkdownScreen, PlainScreen, finished_blocks


@pytest.mark.parametrize(
    ("text", "blocks", "rest"),
    [
        ("", [], ""),
        ("one line", [], "one line"),
        ("one\n\n", [], "one\n\n"),
        ("one\n\nsecond", ["one\n\n"], "second"),
        ("one\n\nsecond\n\nthird\n", ["one\n\n", "second\n\n"], "third\n"),
        ("- a\n\n- b\n\n  more of b\n", [], "- a\n\n- b\n\n  more of b\n"),
        ("1. a\n\n2. b\n\nafter the list", ["1. a\n\n2. b\n\n"], "after the list"),
        ("one\n\n-", [], "one\n\n-"),  # may become an item
        ("```\ncode\n\nmore code\n", [], "```\ncode\n\nmore code\n"),
        ("```py\ncode\n\nmore\n```\n\nafter\n", ["```py\ncode\n\nmore\n```\n\n"], "after\n"),
        ("````\n```\n\nstill code\n```\n\nand here\n", [], "````\n```\n\nstill code\n```\n\nand here\n"),
        ("~~~\n```\n\ninside\n~~~\n\nafter\n", ["~~~\n```\n\ninside\n~~~\n\n"], "after\n"),
    ],
)
def test_blocks(text: str, blocks: list[str], rest: str) -> None:
    assert finished_blocks(text) == (blocks, rest)


@given(st.lists(st.sampled_from(["a", "word ", "\n", "\n\n", "```", "- ", "1. ", "    ", "# ", "\u2028"])))
def test_nothing_is_lost_however_it_arrives(pieces: list[str]) -> None:
    printed: list[str] = []
    rest = ""
    for piece in pieces:
        blocks, rest = finished_blocks(rest + piece)
        printed += blocks
    assert "".join(printed) + rest == "".join(pieces)


def screen() -> tuple[MarkdownScreen, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, height=10, highlight=False)
    return MarkdownScreen(console), output


async def test_an_answer_ends_up_on_the_terminal_as_markdown() -> None:
    markdown, output = screen()
    markdown.begin()
    for piece in ("A **bold** wo", "rd.\n\nSecond par", "agraph."):
        await markdown.add(piece)
    await markdown.end()
    text = output.getvalue()
    assert "\x1b[1mbold\x1b[0m word." in text
    assert "**" not in text
    assert text.rindex("Second paragraph.") > text.rindex("bold")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


async def test_an_answer_higher_than_the_screen_is_printed_whole() -> None:
    markdown, output = screen()
    markdown.begin()
    lines = [f"line-{number}" for number in range(40)]
    await markdown.add("```\n" + "\n".join(lines) + "\n```")
    await markdown.end()
    assert all(line in output.getvalue() for line in lines)


async def test_ending_twice_prints_once() -> None:
    markdown, output = screen()
    markdown.begin()
    await markdown.add("once")
    await markdown.end()
    before = output.getvalue()
    await markdown.end()
    assert output.getvalue() == before


async def test_plain_answers_end_with_one_newline_and_keep_every_byte(capfd: pytest.CaptureFixture[str]) -> None:
    plain = PlainScreen()
    for answer in (["two ", "pieces"], ["ends itself\n"], ["\x1b[31m stays in a pipe"], []):
        plain.begin()
        for piece in answer:
            await plain.add(piece)
        await plain.end()
    plain.note("a note")
    captured = capfd.readouterr()
    assert captured.out == "two pieces\nends itself\n\x1b[31m stays in a pipe\n"
    assert captured.err == "[a note]\n"
