"""What a malformed message gets: its code, the field's name, the id where it could be read, and whether it is fatal."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from wsbatch.errors import BadRequest, TooLarge
from wsbatch.messages import (
    BatchReport,
    Cancel,
    ChatMessage,
    Finished,
    GenerateRequest,
    Hello,
    Ping,
    SamplingParams,
    Timing,
    Tokens,
    Usage,
)
from wsbatch.wire import CODECS, JSON, MSGPACK, SUBPROTOCOLS, Codec, DecodeError, JsonCodec, MsgpackCodec
from wsbatch.wire.fields import MAX_SAFE_INTEGER, WireLimits

CODEC_PAIR = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])


def encoded(codec: Codec, frame: Any) -> bytes | str:
    """Any value in the codec's syntax, valid frame or not."""
    if codec.subprotocol.endswith("json"):
        return json.dumps(frame)
    packed = msgpack.packb(frame, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def refused(codec: Codec, data: bytes | str) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        codec.decode_client(data)
    return caught.value


def generate(**fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": "r1", "prompt": "hi"} | fields


# fields of a generate frame → words the message must have
BAD_FIELDS = [
    # sampling
    ({"max_tokens": -1}, ["max_tokens", "-1", "1", "1000000"]),
    ({"max_tokens": 0}, ["max_tokens", "0"]),
    ({"max_tokens": 1_000_001}, ["max_tokens", "1000001", "1000000"]),
    ({"max_tokens": 1.0}, ["max_tokens", "integer", "1.0"]),
    ({"max_tokens": "5"}, ["max_tokens", "integer", "'5'"]),
    ({"max_tokens": True}, ["max_tokens", "integer", "true"]),
    ({"max_tokens": [5]}, ["max_tokens", "an array of 1"]),
    ({"temperature": math.nan}, ["temperature", "nan", "0", "100"]),
    ({"temperature": math.inf}, ["temperature", "inf"]),
    ({"temperature": -0.1}, ["temperature", "-0.1"]),
    ({"temperature": 100.5}, ["temperature", "100.5"]),
    ({"temperature": True}, ["temperature", "a number", "true"]),
    ({"temperature": {"a": 1}}, ["temperature", "a map"]),
    ({"top_p": 0}, ["top_p", "above 0"]),
    ({"top_p": 1.01}, ["top_p", "1.01"]),
    ({"top_k": -1}, ["top_k", "-1"]),
    ({"top_k": 2**31}, ["top_k", str(2**31)]),
    ({"seed": 2**53}, ["seed", str(2**53), str(2**53 - 1)]),
    ({"seed": -1}, ["seed", "-1"]),
    ({"stop": "END"}, ["stop", "an array", "'END'"]),
    ({"stop": [""]}, ["stop[0]", "empty"]),
    ({"stop": ["a", 5]}, ["stop[1]", "a string", "5"]),
    ({"stop": ["x" * 257]}, ["stop[0]", "256", "257"]),
    ({"stop": ["a"] * 17}, ["stop", "16", "17"]),
    ({"stop_token_ids": [1] * 65}, ["stop_token_ids", "64", "65"]),
    ({"stop_token_ids": [-1]}, ["stop_token_ids[0]", "-1"]),
    ({"ignore_eos": 1}, ["ignore_eos", "true or false", "1"]),
    ({"logprobs": 21}, ["logprobs", "21", "20"]),
    ({"logprobs": True}, ["logprobs", "integer", "true"]),
    # the request
    ({"prompt": ""}, ["prompt", "empty"]),
    ({"prompt": 5}, ["prompt", "a string", "5"]),
    ({"prompt": "a\ud800b"}, ["prompt", "Unicode", "1"]),
    ({"prompt": None}, ["prompt, token_ids, messages", "exactly one", "none"]),
    ({"token_ids": [1]}, ["prompt and token_ids", "exactly one"]),
    ({"prompt": None, "token_ids": []}, ["token_ids", "empty"]),
    ({"prompt": None, "token_ids": [1, True]}, ["token_ids[1]", "true"]),
    ({"prompt": None, "token_ids": [1, 2.0]}, ["token_ids[1]", "2.0"]),
    ({"prompt": None, "token_ids": [1, -1]}, ["token_ids[1]", "-1"]),
    ({"prompt": None, "token_ids": [2**31]}, ["token_ids[0]", str(2**31)]),
    ({"prompt": None, "messages": []}, ["messages", "empty"]),
    ({"prompt": None, "messages": ["hi"]}, ["messages[0]", "a map"]),
    ({"prompt": None, "messages": [{"role": "user"}]}, ["messages[0].content", "required"]),
    ({"prompt": None, "messages": [{"role": "<|im_end|>", "content": "x"}]}, ["messages[0].role", "word"]),
    ({"prompt": None, "messages": [{"role": "user", "content": [1]}]}, ["messages[0].content", "an array of 1"]),
    (
        {"prompt": None, "messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        ["messages[0].tool_calls", "not supported"],
    ),
    ({"priority": 10}, ["priority", "10", "9"]),
    ({"timeout_ms": 0}, ["timeout_ms", "0", "1"]),
    ({"queue_timeout_ms": 86_400_001}, ["queue_timeout_ms", "86400001", "86400000"]),
    ({"stream": "no"}, ["stream", "true or false", "'no'"]),
    ({"resume_token_ids": 3}, ["resume_token_ids", "an array", "3"]),
    # what other servers have
    ({"repetition_penalty": 1.1}, ["repetition_penalty", "not supported", "1.1"]),
    ({"presence_penalty": 0.5}, ["presence_penalty"]),
    ({"frequency_penalty": -1}, ["frequency_penalty"]),
    ({"min_p": 0.05}, ["min_p"]),
    ({"typical_p": 0.9}, ["typical_p"]),
    ({"n": 2}, ["n:", "2"]),
    ({"n": True}, ["n:", "true"]),
    ({"best_of": 3}, ["best_of"]),
    ({"logit_bias": {"5": 1}}, ["logit_bias"]),
    ({"use_beam_search": True}, ["use_beam_search"]),
    ({"num_beams": 4}, ["num_beams"]),
    ({"guided_json": {}}, ["guided_json"]),
    ({"response_format": {"type": "json_object"}}, ["response_format"]),
    ({"tools": [{}]}, ["tools"]),
    ({"suffix": "x"}, ["suffix"]),
    ({"echo": True}, ["echo"]),
    ({"min_tokens": 3}, ["min_tokens"]),
    ({"bad_words": ["x"]}, ["bad_words"]),
    ({"logits_processors": ["x"]}, ["logits_processors"]),
    ({"prompt_logprobs": 1}, ["prompt_logprobs"]),
    ({"max_new_tokens": 5}, ["max_new_tokens", "use max_tokens"]),
    ({"do_sample": True}, ["do_sample", "use temperature"]),
    ({"topP": 0.5}, ["topP", "use top_p"]),
    ({"repetitionPenalty": 2}, ["repetitionPenalty", "not supported", "2"]),
    ({"mirostat_tau": 3}, ["mirostat_tau", "not supported"]),
    ({"add_special_tokens": False}, ["add_special_tokens", "false"]),
    ({"options": {"num_predict": 5}}, ["options", "use its fields beside id"]),
]


@CODEC_PAIR
@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS, ids=[str(fields)[:60] for fields, _ in BAD_FIELDS])
def test_a_bad_field_is_named_with_its_value_and_bound(codec: Codec, fields: dict[str, Any], words: list[str]) -> None:
    exc = refused(codec, encoded(codec, generate(**fields)))
    assert type(exc.error) is BadRequest
    assert exc.id == "r1"
    assert not exc.fatal
    assert [word for word in words if word not in exc.error.message] == []


@CODEC_PAIR
@pytest.mark.parametrize(
    ("frame", "word"),
    [
        ([], "map"),
        (5, "map"),
        ("generate", "map"),
        (None, "map"),
        ({}, "type"),
        ({"type": None}, "type"),
        ({"type": 5}, "type"),
        ({"type": ["generate"]}, "type"),
        ({"type": "genrate"}, "generate, cancel, ping"),
        ({"type": "wach"}, "watch, unwatch"),
        ({"type": "batch"}, "generate, cancel, ping"),
        ({"type": "generate", "prompt": "x"}, "id: is required"),
        ({"type": "generate", "prompt": "x", "id": True}, "id"),
        ({"type": "generate", "prompt": "x", "id": 1.5}, "id"),
        ({"type": "generate", "prompt": "x", "id": ""}, "id"),
        ({"type": "generate", "prompt": "x", "id": "é" * 33}, "64 bytes"),
        ({"type": "generate", "prompt": "x", "id": 2**53}, str(2**53)),
        ({"type": "cancel"}, "id: is required"),
        ({"type": "cancel", "id": [1]}, "id"),
        ({"type": "ping"}, "nonce: is required"),
        ({"type": "ping", "nonce": {}}, "nonce"),
    ],
)
def test_a_frame_without_a_usable_id_is_refused_without_one(codec: Codec, frame: Any, word: str) -> None:
    exc = refused(codec, encoded(codec, frame))
    assert type(exc.error) is BadRequest
    assert exc.id is None
    assert not exc.fatal
    assert word in exc.error.message


@CODEC_PAIR
def test_the_id_of_an_unknown_type_is_kept(codec: Codec) -> None:
    assert refused(codec, encoded(codec, {"type": "genrate", "id": 7})).id == 7


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (MSGPACK, b""),
        (MSGPACK, b"\xc1"),
        (MSGPACK, b"\x81\xa4type"),
        (MSGPACK, b"\x80\x80"),
        (MSGPACK, b"GET / HTTP/1.1\r\n"),
        (MSGPACK, "{}"),
        (MSGPACK, b"\x81\xa4type\xc1"),
        (JSON, ""),
        (JSON, "{"),
        (JSON, "{}{}"),
        (JSON, "{'type': 'ping'}"),
        (JSON, "9" * 5000 + "}"),
        (JSON, b"{}"),
    ],
)
def test_what_is_not_the_subprotocol_is_fatal(codec: Codec, data: bytes | str) -> None:
    exc = refused(codec, data)
    assert type(exc.error) is BadRequest
    assert exc.error.close_code == 1007
    assert exc.fatal
    assert re.search(r"\w{2,}$|\)$", exc.error.message), "it says why"


@CODEC_PAIR
def test_a_message_over_the_limit_is_too_large_and_fatal(codec: Codec) -> None:
    small = type(codec)(WireLimits(max_message_bytes=64))
    assert isinstance(small.decode_client(encoded(codec, generate())), GenerateRequest)
    exc = refused(small, encoded(codec, generate(prompt="é" * 40)))
    assert type(exc.error) is TooLarge
    assert exc.error.close_code == 1009
    assert exc.fatal
    assert "64" in exc.error.message
    assert refused(codec, encoded(codec, generate(prompt="x" * 10_000_000))).fatal


@CODEC_PAIR
def test_too_many_prompt_tokens_are_too_large_but_not_fatal(codec: Codec) -> None:
    small = type(codec)(WireLimits(max_token_ids=3))
    exc = refused(small, encoded(codec, generate(prompt=None, token_ids=[1, 2, 3, 4])))
    assert type(exc.error) is TooLarge
    assert (exc.id, exc.fatal) == ("r1", False)


@pytest.mark.parametrize("depth", [5_000, 1_000_000])
def test_deep_nesting_is_refused_and_the_connection_goes_on(depth: int) -> None:
    for codec, data in (
        (MSGPACK, b"\x81\xa1x" * depth + b"\xc0"),
        (MSGPACK, b"\x91" * depth + b"\xc0"),
        (JSON, '{"x":' * depth + "1" + "}" * depth),
        (JSON, "[" * depth + "]" * depth),
    ):
        exc = refused(codec, data)
        assert type(exc.error) is BadRequest
        assert not exc.fatal


@CODEC_PAIR
@pytest.mark.parametrize("junk", [[[]] * 5000, [{}] * 5000])
def test_the_containers_of_a_message_are_bounded(codec: Codec, junk: Any) -> None:
    exc = refused(codec, encoded(codec, generate(junk=junk)))
    assert "4096" in exc.error.message
    assert not exc.fatal


def test_brackets_in_a_json_string_are_not_arrays() -> None:
    prompt = '[\\"' * 5000
    request = JSON.decode_client(encoded(JSON, generate(prompt=prompt)))
    assert isinstance(request, GenerateRequest)
    assert request.prompt == prompt


LONG = "9" * 5000


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (f'"seed":{LONG}', ["seed", str(2**53 - 1), "an integer of over 500 digits"]),
        (f'"seed":-{LONG}', ["seed", "from 0"]),
        (f'"top_k":{"9" * 4000}', ["top_k", "an integer of over 500 digits"]),
        (f'"top_k":{"9" * 400}', ["top_k", "9" * 40 + "…"]),
        (f'"temperature":{LONG}', ["temperature", "from 0 to 100"]),
        ('"temperature":1e999', ["temperature", "inf"]),
        (f'"temperature":1e{LONG}', ["temperature", "inf"]),
        ('"temperature":-Infinity', ["temperature", "-inf"]),
        ('"max_tokens":1e999', ["max_tokens", "an integer", "inf"]),
        ('"max_tokens":NaN', ["max_tokens", "an integer", "nan"]),
        (f'"stop_token_ids":[1,{LONG}]', ["stop_token_ids[1]"]),
        (f'"resume_token_ids":[{"1," * 3000}{LONG}]', ["resume_token_ids[3000]"]),
        (f'"n":{LONG}', ["n: is not supported"]),
        ('"stream":NaN', ["stream", "nan"]),
        ('"stop":["\\ud800"]', ["stop[0]", "Unicode"]),
    ],
)
def test_numbers_that_no_field_can_hold_in_json(fields: str, words: list[str]) -> None:
    exc = refused(JSON, f'{{"type":"generate","id":"r1","prompt":"hi",{fields}}}')
    assert (type(exc.error), exc.id, exc.fatal) == (BadRequest, "r1", False)
    assert [word for word in words if word not in exc.error.message] == []


@pytest.mark.parametrize("id", [LONG, f"-{LONG}", "1e999", "NaN", '"\\udc00"'])
def test_an_id_that_no_frame_can_hold_in_json(id: str) -> None:
    exc = refused(JSON, f'{{"type":"generate","prompt":"hi","id":{id}}}')
    assert exc.error.message.startswith("id: ")
    assert (exc.id, exc.fatal) == (None, False)


def test_a_number_of_thousands_of_digits_that_nobody_reads_is_ignored() -> None:
    junk = ",".join(["[]", "{}"] * 2000)
    text = f'{{"type":"generate","id":"r1","prompt":"hi","junk":[{junk}],"more":{LONG},"and":NaN}}'
    assert JSON.decode_client(text) == GenerateRequest(id="r1", prompt="hi")
    assert refused(JSON, LONG).error.message == "a frame must be a map, got an integer of over 500 digits"
    with pytest.raises(DecodeError, match="nonce: must be from"):
        JSON.decode_server(f'{{"type":"pong","nonce":{LONG}}}')


@pytest.mark.parametrize("timestamp", [b"\xd4\xff\x00", b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd7\xff" + b"\xff" * 8])
def test_a_msgpack_timestamp_that_is_none_costs_its_message_only(timestamp: bytes) -> None:
    exc = refused(MSGPACK, b"\x84\xa4type\xa8generate\xa2id\x01\xa6prompt\xa1x\xa4seed" + timestamp)
    assert type(exc.error) is BadRequest
    assert not exc.fatal
    assert exc.error.message.strip()[-1] not in ":"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"\xcf" + b"\xff" * 8, ["from 0 to", str(2**64 - 1)]),
        (b"\xd3\x80" + bytes(7), ["from 0 to", str(-(2**63))]),
        (b"\xca\x7f\xc0\x00\x00", ["an integer", "nan"]),
        (b"\xd6\xff" + bytes(4), ["an integer", "a msgpack extension"]),
        (b"\xc4\x01x", ["an integer", "binary data"]),
    ],
    ids=["uint64", "int64", "nan", "timestamp", "bin"],
)
def test_msgpack_values_that_are_no_seed(value: bytes, words: list[str]) -> None:
    exc = refused(MSGPACK, b"\x84\xa4type\xa8generate\xa2id\x01\xa6prompt\xa1x\xa4seed" + value)
    assert [word for word in ("seed: ", *words) if word not in exc.error.message] == []
    assert (exc.id, exc.fatal) == (1, False)


def test_lengths_that_msgpack_claims_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(msgpack, "unpackb", lambda *args, **options: built.append(args))
    assert "entries" in refused(MSGPACK, b"\xdd\x00\x10\x00\x00" * 1000 + b"\xc0" * 2**20).error.message
    assert refused(MSGPACK, b"\xdc\x00\x40" * 90 + b"\xc0" * 1000).fatal
    assert built == []


def test_keys_must_be_strings_and_come_once() -> None:
    exc = refused(MSGPACK, msgpack.packb(generate() | {5: 6}))
    assert "keys of a map must be strings, got 5" in exc.error.message
    assert (exc.id, exc.fatal) == ("r1", False)
    exc = refused(JSON, '{"type":"generate","id":1,"prompt":"a","prompt":"b"}')
    assert "'prompt': is there twice" in exc.error.message
    assert (exc.id, exc.fatal) == (1, False)
    exc = refused(MSGPACK, b"\x83\xa4type\xa4ping\xa2id\x01\xa2id\x02")
    assert "'id': is there twice" in exc.error.message
    assert exc.id is None, "which of the two was meant is unknown"
    exc = refused(JSON, '{"type":"generate","id":1,"messages":[{"role":"user","content":"a","content":"b"}]}')
    assert "'content'" in exc.error.message


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (b"\xa3a\xffb", "Unicode at character 1"),
        (b"\xa3\xed\xa0\x80", "Unicode at character 0"),
        (b"\xd4\x05\x00", "a msgpack extension"),
        (b"\xd6\xff\x00\x00\x00\x00", "a msgpack extension"),
        (b"\xc4\x02hi", "binary data"),
    ],
    ids=["utf8", "surrogate", "ext", "timestamp", "bin"],
)
def test_msgpack_values_that_are_no_text(prompt: bytes, word: str) -> None:
    exc = refused(MSGPACK, b"\x83\xa4type\xa8generate\xa2id\x01\xa6prompt" + prompt)
    assert "prompt" in exc.error.message
    assert word in exc.error.message
    assert (exc.id, exc.fatal) == (1, False)


@CODEC_PAIR
def test_unknown_keys_are_ignored_and_neutral_ones_pass(codec: Codec) -> None:
    frame = generate(
        user="someone",
        metadata={"a": [1, {"b": None}]},
        repetition_penalty=1.0,
        n=1,
        echo=False,
        tools=[],
        min_p=0,
        mirostat=0,
        mirostat_tau=3,
        add_special_tokens=True,
        repetitionPenalty=1,
        top_logprobs=None,
        seed=None,
        timeout_ms=None,
    )
    assert codec.decode_client(encoded(codec, frame)) == GenerateRequest(id="r1", prompt="hi")


@CODEC_PAIR
def test_every_field_of_a_request_arrives(codec: Codec) -> None:
    frame = {
        "type": "generate",
        "id": 2**53 - 1,
        "messages": [{"role": "system", "content": "", "id": "x"}, {"role": "user", "content": "é😀"}],
        "max_tokens": 7,
        "temperature": 1,
        "top_p": 1,
        "top_k": 3,
        "seed": MAX_SAFE_INTEGER,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logprobs": 0,
        "priority": 0,
        "timeout_ms": 1,
        "queue_timeout_ms": 86_400_000,
        "stream": False,
        "resume_token_ids": [1, 2],
        "parse_special": True,
    }
    assert codec.decode_client(encoded(codec, frame)) == GenerateRequest(
        id=2**53 - 1,
        messages=(ChatMessage("system", ""), ChatMessage("user", "é😀")),
        sampling=SamplingParams(7, 1.0, 1.0, 3, MAX_SAFE_INTEGER, ("a", "b"), (5,), True, 0),
        priority=0,
        timeout_ms=1,
        queue_timeout_ms=86_400_000,
        stream=False,
        resume_token_ids=(1, 2),
        parse_special=True,
    )


@CODEC_PAIR
def test_defaults_stay_off_the_wire(codec: Codec) -> None:
    data = codec.encode_client(GenerateRequest(id=1, prompt="x"))
    assert isinstance(data, str) or data == msgpack.packb({"type": "generate", "id": 1, "prompt": "x"})
    assert isinstance(data, bytes) or data == '{"type":"generate","id":1,"prompt":"x"}'


@CODEC_PAIR
def test_a_request_that_has_no_form_on_the_wire(codec: Codec) -> None:
    for request in (GenerateRequest(prompt="\ud800"), GenerateRequest(prompt="x", timeout_ms=object())):  # type: ignore[arg-type]
        with pytest.raises(BadRequest):
            codec.encode_client(request)
    assert codec.decode_client(codec.encode_client(Cancel(1))) == Cancel(1), "a failure leaves nothing behind"


@CODEC_PAIR
def test_log_probabilities_are_finite_on_the_wire(codec: Codec) -> None:
    tokens = Tokens(1, 0, (5,), "a", ((-math.inf, ((5, -0.5), (6, math.nan))),))
    decoded = codec.decode_server(codec.encode_server(tokens))
    assert decoded == Tokens(1, 0, (5,), "a", ((-9999.0, ((5, -0.5), (6, -9999.0))),))


@CODEC_PAIR
@pytest.mark.parametrize(
    ("frame", "word"),
    [
        ({"type": "tokens", "id": 1, "token_ids": [], "text": ""}, "index: is required"),
        ({"type": "tokens", "id": 1, "index": 0, "token_ids": [None], "text": ""}, "token_ids[0]"),
        ({"type": "tokens", "id": 1, "index": 0, "token_ids": [], "text": "", "logprobs": [[1]]}, "logprobs[0]"),
        ({"type": "finished", "id": 1}, "is required"),
        ({"type": "hello", "version": 1, "model": "m", "server": "s", "state": "ready", "limits": {}}, "limits."),
        ({"type": 5}, "type"),
        ({}, "type"),
        ([], "map"),
    ],
)
def test_a_malformed_frame_of_a_server(codec: Codec, frame: Any, word: str) -> None:
    with pytest.raises(DecodeError, match=word.replace("[", r"\[")):
        codec.decode_server(encoded(codec, frame))


@CODEC_PAIR
def test_a_client_ignores_what_a_newer_server_adds(codec: Codec) -> None:
    assert codec.decode_server(encoded(codec, {"type": "weather", "slots": 8})) is None
    limits = {"max_model_len": 1, "max_message_bytes": 2, "max_live_requests": 3, "max_logprobs": 4, "max_new": 5}
    hello = {"type": "hello", "version": 1, "model": "m", "server": "s", "state": "ready", "limits": limits, "new": 1}
    assert isinstance(codec.decode_server(encoded(codec, hello)), Hello)


def test_a_large_answer_is_not_bounded_for_the_client() -> None:
    frame = {"type": "tokens", "id": 1, "index": 0, "token_ids": [1], "text": "", "logprobs": [[-1.0, []]] * 10_000}
    decoded = MSGPACK.decode_server(encoded(MSGPACK, frame))
    assert isinstance(decoded, Tokens)
    assert decoded.logprobs is not None
    assert len(decoded.logprobs) == 10_000


@CODEC_PAIR
def test_a_long_answer_is_encoded_in_pieces(codec: Codec) -> None:
    entry = (-0.5, tuple((token_id, -math.inf) for token_id in range(20)))
    usage, timing, batch = Usage(1, 8000), Timing(1.0, 2.0, 3.0, 4.0), BatchReport(1, 1.0, 1, 1, 0.0)
    finished = Finished("a", "length", "x" * 8000, usage, timing, batch, tuple(range(8000)), (entry,) * 8000)
    pieces = list(codec.encoding(finished))
    assert len(pieces) > 30
    assert max(map(len, pieces)) < 128 * 1024
    whole = codec.encode_server(finished)
    assert whole == pieces[0][:0].join(pieces)  # type: ignore[arg-type]
    decoded = codec.decode_server(whole)
    floored = (-0.5, tuple((token_id, -9999.0) for token_id in range(20)))
    assert decoded == replace(finished, logprobs=(floored,) * 8000)
    naive = {"type": "tokens", "id": 1, "index": 0, "token_ids": list(range(9000)), "text": ""}
    tokens = codec.encode_server(Tokens(1, 0, tuple(range(9000)), ""))
    assert tokens == (msgpack.packb(naive) if codec is MSGPACK else json.dumps(naive, separators=(",", ":")))
    assert list(codec.encoding(Tokens(1, 0, (1, 2), "ab"))) == [codec.encode_server(Tokens(1, 0, (1, 2), "ab"))]


def test_the_subprotocols() -> None:
    assert SUBPROTOCOLS == ("wsbatch.v1.msgpack", "wsbatch.v1.json")
    assert {"wsbatch.v1.msgpack": MsgpackCodec, "wsbatch.v1.json": JsonCodec} == CODECS
    assert isinstance(MSGPACK.encode_client(Ping(1)), bytes)
    assert isinstance(JSON.encode_client(Ping(1)), str)


def test_json_text_is_compact_and_readable() -> None:
    text = JSON.encode_server(Tokens("é", 3, (1, 2), " 안녕"))
    assert text == '{"type":"tokens","id":"é","index":3,"token_ids":[1,2],"text":" 안녕"}'


def test_a_finished_frame_has_its_parts_as_maps() -> None:
    finished = Finished(1, "stop", "", Usage(3, 4), Timing(1.0, 2.0, 3.0, 4.0, 0.5), BatchReport(2, 1.5, 10, 7, 0.0))
    data = JSON.encode_server(finished)
    assert json.loads(data) == {
        "type": "finished",
        "id": 1,
        "finish_reason": "stop",
        "text": "",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "cached_tokens": 0},
        "timing": {"queue_ms": 1.0, "prefill_ms": 2.0, "ttft_ms": 3.0, "total_ms": 4.0, "batch_wait_ms": 0.5},
        "batch": {"max_size": 2, "mean_size": 1.5, "issued_tokens": 10, "useful_tokens": 7, "hol_delay_ms": 0.0},
    }
