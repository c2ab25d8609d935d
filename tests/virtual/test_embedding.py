"""A program that tests itself on `open_virtual_engine` sees its own error, as it is, and not a group with it."""

import gc

import pytest
import trio
import trio.testing

from wsbatch.config import EngineConfig
from wsbatch.messages import Accepted, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.testing import open_virtual_engine

REQUEST = GenerateRequest(prompt="ä", sampling=SamplingParams(max_tokens=4))


@pytest.mark.parametrize("failing_step", [False, True])
@pytest.mark.parametrize("live", [False, True])
async def test_the_error_of_the_block_is_raised(
    autojump_clock: trio.testing.MockClock, failing_step: bool, live: bool
) -> None:
    error = KeyError("what the program's test has found")

    async def program() -> None:
        async with open_virtual_engine(EngineConfig(model="simulated")) as (engine, worker):
            worker.fail = lambda plan: failing_step
            stream = await engine.submit(REQUEST)
            if not live:
                await trio.sleep(1)
                assert stream.terminal is not None
            raise error

    with pytest.raises(KeyError) as raised:
        await program()
    assert raised.value is error


async def test_a_block_may_leave_an_answer_in_the_middle_and_go_on_reading_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No generator is left behind, whose collection would warn, and no event is lost."""
    async with open_virtual_engine(EngineConfig(model="simulated")) as (engine, _):
        stream = await engine.submit(REQUEST)
        await trio.sleep(1)
        first = await anext(stream)
        rest = [event async for event in stream]
        assert [type(event) for event in (first, *rest)] == [Accepted, Tokens, Finished]
    with pytest.raises(KeyError):  # noqa: PT012
        async with open_virtual_engine(EngineConfig(model="simulated")) as (engine, _):
            async for _ in await engine.submit(REQUEST):
                raise KeyError
    gc.collect()
