"""Whatever frames a client sends: the session ends cleanly, its engine is left idle, and no id gets two ends."""

from collections import Counter
from contextlib import suppress

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_connection import MemoryConnection
from wsbatch.config import ServerConfig
from wsbatch.messages import Accepted, Cancel, Failed, Finished, GenerateRequest, Ping, SamplingParams, Tokens
from wsbatch.server.session import Session
from wsbatch.testing import ScriptedEngine
from wsbatch.wire import JSON, MSGPACK, Codec

ids = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b"]))
generates = st.builds(
    lambda id, tokens: GenerateRequest(id=id, prompt="x", sampling=SamplingParams(max_tokens=tokens)),
    ids,
    st.integers(1, 5),
)
messages = st.one_of(generates, generates, st.builds(Cancel, ids), st.builds(Ping, st.integers(0, 9)))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
fields = st.dictionaries(
    st.sampled_from(["type", "id", "prompt", "token_ids", "max_tokens", "temperature", "stop", "messages", "nonce"]),
    st.sampled_from(["generate", "cancel", "ping"]) | ids | values,
)
# What to do: send a message, a map of odd fields, raw bytes or text; or let time pass, or stop and resume reading.
steps = st.one_of(
    messages,
    messages,
    fields,
    st.binary(max_size=20),
    st.text(max_size=20),
    st.sampled_from(["hold", "release"]).map(lambda word: (word, 0.0)),
    st.tuples(st.just("sleep"), st.sampled_from([0.0, 0.5, 5.0])),
)


async def drive(codec: Codec, script: list[object], submit_s: float) -> None:
    engine = ScriptedEngine(submit_s=submit_s)
    client = MemoryConnection(codec)
    session = Session(client, engine, ServerConfig(max_live_requests=3, send_timeout_s=2.0), codec=codec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run)
        async with trio.open_nursery() as playing:
            playing.start_soon(lambda: engine.play(interval_s=0.3))
            for step in script:
                with suppress(trio.BrokenResourceError):  # the session has ended
                    match step:
                        case ("sleep", float(seconds)):
                            await trio.sleep(seconds)
                        case ("hold", _):
                            client.hold()
                        case ("release", _):
                            client.release()
                        case dict():
                            with suppress(OverflowError, ValueError, TypeError):
                                await client.say(codec._pack(step))
                        case _:
                            await client.say(step)
            await trio.sleep(10)
            playing.cancel_scope.cancel()
        client.disconnect()
        gone_at = trio.current_time()
    assert trio.current_time() - gone_at < 1
    assert (engine.live, engine.submitting) == ([], 0)
    check_protocol(client)


def check_protocol(client: MemoryConnection) -> None:
    """Of each id's frames: accepted, tokens without a gap, one end; and again, if the id was used again."""
    live: dict[object, int] = {}
    ends: Counter[object] = Counter()
    for frame in client.frames[1:]:
        match frame:
            case Accepted(id=id):
                assert id not in live
                live[id] = 0
            case Tokens(id=id):
                assert frame.index == live[id]
                live[id] += len(frame.token_ids)
            case Finished(id=id):
                assert frame.usage.completion_tokens == live.pop(id)
                ends[id] += 1
            case Failed(id=id):
                assert frame.code in ("bad_request", "duplicate_id", "quota", "too_large")
                assert frame.code == "duplicate_id" or id is None or id not in live
    assert client.aborted or not live


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([MSGPACK, JSON]), st.lists(steps, max_size=25), st.sampled_from([0.0, 0.7]))
def test_any_frames(codec: Codec, script: list[object], submit_s: float) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(drive, codec, script, submit_s, clock=clock)
