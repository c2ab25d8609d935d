"""For all messages: what is encoded decodes to the same. For all bytes: decoding raises DecodeError alone."""

import json
import math
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.errors import BY_CODE, BadRequest, TooLarge
from wsbatch.messages import (
    Accepted,
    BatchReport,
    BatchSnapshot,
    BatchStep,
    Cancel,
    ChatMessage,
    ClientMessage,
    DrainingNotice,
    Failed,
    Finished,
    GenerateRequest,
    GetStatus,
    Hello,
    Limits,
    Ping,
    Pong,
    SamplingParams,
    ServerMessage,
    Started,
    Status,
    Timing,
    Tokens,
    Unwatch,
    Usage,
    Watch,
)
from wsbatch.wire import JSON, MSGPACK, Codec, DecodeError
from wsbatch.wire.fields import MAX_SAFE_INTEGER, MAX_TOKEN_ID
from wsbatch.wire.unsupported import IN_MESSAGE, REFUSED

# Without a deadline: nothing here is a test of time.
FUZZ = settings(max_examples=150, deadline=None)
CODEC_PAIR = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])

counts = st.integers(0, MAX_SAFE_INTEGER)
sizes = st.floats(0, 1e12)
texts = st.text(st.characters(exclude_categories=["Cs"]))
ids = st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER) | texts.filter(lambda text: 0 < len(text.encode()) <= 64)
token_ids = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=8).map(tuple)
some_token_ids = st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=8).map(tuple)
logprob = st.floats(-1e4, 0)
logprobs = st.none() | st.lists(
    st.tuples(logprob, st.lists(st.tuples(st.integers(0, MAX_TOKEN_ID), logprob), max_size=3).map(tuple)), max_size=4
).map(tuple)

sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 1_000_000),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, MAX_TOKEN_ID),
    seed=st.none() | counts,
    stop=st.lists(texts.filter(lambda text: 0 < len(text) <= 256), max_size=16).map(tuple),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
roles = st.sampled_from(["system", "user", "assistant", "tool"])
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": texts.filter(bool)}),
    st.fixed_dictionaries({"token_ids": some_token_ids}),
    st.fixed_dictionaries(
        {"messages": st.lists(st.builds(ChatMessage, role=roles, content=texts), min_size=1, max_size=4).map(tuple)}
    ),
)
timeouts = st.none() | st.integers(1, 86_400_000)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    return GenerateRequest(
        id=draw(ids),
        sampling=draw(sampling),
        priority=draw(st.integers(0, 9)),
        timeout_ms=draw(timeouts),
        queue_timeout_ms=draw(timeouts),
        stream=draw(st.booleans()),
        resume_token_ids=draw(token_ids),
        parse_special=draw(st.booleans()),
        **draw(prompts),
    )


client_messages = (
    requests()
    | st.builds(Cancel, id=ids)
    | st.builds(Ping, nonce=ids)
    | st.builds(GetStatus)
    | st.builds(Watch)
    | st.builds(Unwatch)
)
batch_rows = st.lists(
    st.tuples(counts, counts, st.sampled_from(["prefill", "decode", "kept", "held"])), max_size=4
).map(tuple)
server_messages = st.one_of(
    st.builds(
        Hello,
        version=counts,
        model=texts,
        server=texts,
        state=st.sampled_from(["ready", "draining", "dead"]),
        watch=st.booleans(),
        revision=texts,
        dtype=texts,
        limits=st.builds(
            Limits, max_model_len=counts, max_message_bytes=counts, max_live_requests=counts, max_logprobs=counts
        ),
    ),
    st.builds(Accepted, id=ids, prompt_tokens=counts, requests_ahead=counts, seed=counts),
    st.builds(Tokens, id=ids, index=counts, token_ids=token_ids, text=texts, logprobs=logprobs),
    st.builds(
        Finished,
        id=ids,
        finish_reason=st.sampled_from(["stop", "length", "cancelled", "timeout", "shutdown"]),
        text=texts,
        usage=st.builds(Usage, prompt_tokens=counts, completion_tokens=counts, cached_tokens=counts),
        timing=st.builds(Timing, queue_ms=sizes, prefill_ms=sizes, ttft_ms=sizes, total_ms=sizes, batch_wait_ms=sizes),
        batch=st.builds(
            BatchReport,
            max_size=counts,
            mean_size=sizes,
            issued_tokens=counts,
            useful_tokens=counts,
            hol_delay_ms=sizes,
        ),
        token_ids=st.none() | token_ids,
        logprobs=logprobs,
    ),
    st.builds(
        Failed,
        id=st.none() | ids,
        code=st.sampled_from(sorted(BY_CODE)),
        status=st.integers(400, 599),
        message=texts,
        retry_after_ms=st.none() | counts,
    ),
    st.builds(DrainingNotice, deadline_ms=counts),
    st.builds(Pong, nonce=ids),
    st.builds(Started, id=ids),
    st.builds(
        Status,
        state=st.sampled_from(["ready", "draining", "dead"]),
        waiting=counts,
        running=counts,
        queued_tokens=counts,
        running_tokens=counts,
        max_batch_size=counts,
        queue_ms=sizes,
        step_ms=sizes,
        retry_after_ms=st.none() | counts,
    ),
    st.builds(
        BatchSnapshot,
        t_ms=sizes,
        scheduler=st.sampled_from(["dynamic", "continuous"]),
        slots=counts,
        queue_depth=counts,
        running=counts,
        tokens_per_s=sizes,
        steps=st.lists(st.builds(BatchStep, t_ms=sizes, ms=sizes, rows=batch_rows), max_size=3).map(tuple),
        steps_dropped=counts,
        slot_utilization=st.none() | sizes,
        waste_fraction=st.none() | sizes,
    ),
)


@CODEC_PAIR
@FUZZ
@given(message=client_messages)
def test_client_messages_round_trip(codec: Codec, message: ClientMessage) -> None:
    assert codec.decode_client(codec.encode_client(message)) == message


@CODEC_PAIR
@FUZZ
@given(message=requests())
def test_a_glance_at_a_request_shows_its_id_and_priority(codec: Codec, message: GenerateRequest) -> None:
    assert codec.glance(codec.encode_client(message)) == (message.id, message.priority)


@CODEC_PAIR
@FUZZ
@given(message=server_messages)
def test_server_messages_round_trip(codec: Codec, message: ServerMessage) -> None:
    assert codec.decode_server(codec.encode_server(message)) == message


# Values that either format can carry, wrong types and near misses included; msgpack adds its own below.
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
)
known_keys = st.sampled_from(
    ["type", "id", "nonce", "role", "content"]
    + [spec.name for spec in fields(GenerateRequest)]
    + [spec.name for spec in fields(SamplingParams)]
    + [spec.name for spec in fields(Finished)]
    + [spec.name for spec in fields(Hello)]
    + [spec.name for spec in fields(BatchSnapshot)]
    + sorted(REFUSED)
    + [name for row in IN_MESSAGE for name in row.names.split()]
)
keys = known_keys | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=20
)
types = st.sampled_from(["generate", "cancel", "ping", "get_status", "watch", "unwatch"]) | st.sampled_from(
    ["hello", "accepted", "started", "tokens", "finished", "error", "draining", "pong", "status", "batch"]
)
frames = st.builds(
    lambda kind, rest: {"type": kind, "id": 1, "prompt": "x"} | rest, types, st.dictionaries(keys, values, max_size=6)
)
ext_types = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8))
msgpack_values = st.recursive(
    scalars | st.binary(max_size=8) | ext_types,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars | keys, inner, max_size=5),
    max_leaves=20,
)


def test_a_glance_at_a_key_that_is_an_array_sees_nothing() -> None:
    assert MSGPACK.glance(b"\x82\xa4type\xa6cancel\x90id\xd0\xdf") is None


def check_glance(codec: Codec, data: bytes | str) -> None:
    """Whatever a glance sees, decoding sees too."""
    glance = codec.glance(data)
    if glance is None:
        return
    problem: DecodeError | None = None
    try:
        message = codec.decode_client(data)
    except DecodeError as exc:
        problem = exc
    if problem is not None:
        assert not problem.fatal
        assert problem.id in (glance[0], None)
    else:
        assert isinstance(message, GenerateRequest)
        assert glance == (message.id, message.priority)


def check_decoding(codec: Codec, data: bytes | str) -> None:
    """Both directions: a message, or a DecodeError whose parts an error frame can carry."""
    check_glance(codec, data)
    for decode in (codec.decode_client, codec.decode_server):
        caught: DecodeError | None = None
        try:
            decode(data)
        except DecodeError as exc:
            caught = exc
        if caught is not None:
            assert type(caught.error) in (BadRequest, TooLarge)
            failed = Failed(caught.id, caught.error.code, caught.error.status, caught.error.message)
            assert codec.decode_server(codec.encode_server(failed)) == failed
            assert len(caught.error.message) < 400


@FUZZ
@given(data=st.binary() | st.builds(lambda head, tail: head + tail, st.binary(max_size=4), st.binary(max_size=64)))
def test_arbitrary_bytes(data: bytes) -> None:
    check_decoding(MSGPACK, data)
    check_decoding(JSON, data.decode("utf-8", "replace"))


@FUZZ
@given(text=st.text(st.characters(), max_size=200) | st.text('{}[]",:\\ueE+-.019 nulltrefasNIi', max_size=60))
def test_arbitrary_text(text: str) -> None:
    check_decoding(JSON, text)
    check_decoding(MSGPACK, text)


@FUZZ
@given(value=msgpack_values)
def test_arbitrary_msgpack(value: Any) -> None:
    check_decoding(MSGPACK, msgpack.packb(value, unicode_errors="surrogatepass"))


@FUZZ
@given(value=values, digits=st.integers(4200, 4400), exponent=st.sampled_from(["", "e9", "E-4000", ".5e+4000"]))
def test_arbitrary_json(value: Any, digits: int, exponent: str) -> None:
    check_decoding(JSON, json.dumps(value))
    check_decoding(JSON, json.dumps(value).replace("1", "7" * digits + exponent))


@CODEC_PAIR
@FUZZ
@given(frame=frames)
def test_near_misses(codec: Codec, frame: Any) -> None:
    if codec is JSON:
        check_decoding(codec, json.dumps(frame))
    else:
        check_decoding(codec, msgpack.packb(frame, unicode_errors="surrogatepass"))


@FUZZ
@given(message=client_messages, cut=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_damaged_messages(message: ClientMessage, cut: float, flip: int) -> None:
    whole = MSGPACK.encode_client(message)
    assert isinstance(whole, bytes)
    at = math.floor(cut * len(whole))
    check_decoding(MSGPACK, whole[:at])
    check_decoding(MSGPACK, whole[:at] + bytes([flip]) + whole[at + 1 :])


@FUZZ
@given(
    message=requests(), extra=st.dictionaries(st.text(min_size=1, max_size=62).map("x_".__add__), values, max_size=4)
)
def test_unknown_keys_change_nothing(message: GenerateRequest, extra: dict[str, Any]) -> None:
    text = JSON.encode_client(message)
    assert JSON.decode_client(json.dumps(json.loads(text) | extra)) == message
