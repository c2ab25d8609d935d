"""What tokenising costs decides where it is done."""

import pytest

from wsbatch.errors import TooLarge
from wsbatch.messages import ChatMessage, GenerateRequest
from wsbatch.text import ByteText
from wsbatch.tokenising import Run, Tokenising


def elsewhere(calls: list[str]) -> Run:
    async def run(function: object) -> list[int]:
        calls.append("elsewhere")
        return [1]

    return run


def conversation(count: int) -> GenerateRequest:
    return GenerateRequest(messages=(ChatMessage("user", ""),) * count)


@pytest.mark.parametrize(
    ("request_", "away"),
    [
        (GenerateRequest(prompt="x" * 2048), False),
        (GenerateRequest(prompt="x" * 2049), True),
        (GenerateRequest(prompt="é" * 1025), True),
        (conversation(16), False),
        (conversation(1024), True),
        (GenerateRequest(token_ids=(1,) * 100_000), False),
    ],
)
async def test_what_takes_long_is_done_off_the_event_loop(request_: GenerateRequest, away: bool) -> None:
    calls: list[str] = []
    await Tokenising(ByteText(), 100_000, run=elsewhere(calls))(request_)
    assert calls == ["elsewhere"] * away


@pytest.mark.parametrize("letter", ["x", "é"])
async def test_a_text_that_cannot_fit_is_refused_by_its_size(letter: str) -> None:
    calls: list[str] = []
    with pytest.raises(TooLarge, match="100"):
        await Tokenising(ByteText(), 100, run=elsewhere(calls))(GenerateRequest(prompt=letter * 99 + "xx"))
    assert calls == []
