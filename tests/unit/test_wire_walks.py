"""A client's message is bounded before it is built, and what is large is decoded in pieces, to the same values."""

import json
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.errors import BadRequest, TooLarge
from wsbatch.messages import GenerateRequest, Ping
from wsbatch.wire import JSON, MSGPACK, Codec, DecodeError, JsonCodec, MsgpackCodec, Text, json_walk, msgpack_walk
from wsbatch.wire.fields import Large, WireLimits
from wsbatch.wire.json_walk import JsonWalk
from wsbatch.wire.msgpack_walk import MsgpackWalk
from wsbatch.wire.tally import PIECE_BYTES, Tally

MOST = WireLimits().max_message_bytes
CODEC_PAIR = pytest.mark.parametrize("codec", [MSGPACK, JSON], ids=["msgpack", "json"])
WIDE_CHARS = WireLimits().max_wide_chars
IDS = [100 + index for index in range(100_000)]


def message(codec: Codec, frame: Any) -> bytes:
    return msgpack.packb(frame) if codec is MSGPACK else Text(json.dumps(frame).encode())


def generate(**fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": "r1", **fields}


class Library:
    """How many bytes each call of the two decoding libraries is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        for module, name in ((json, "loads"), (msgpack, "unpackb")):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, function: Any) -> Any:
        def call(data: bytes | str, **options: Any) -> Any:
            self.sizes.append(len(data))
            return function(data, **options)

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def array(item: bytes) -> bytes:
    count = MOST // len(item) - 64
    return b"\x82\xa4type\xa4ping\xa1x\xdd" + count.to_bytes(4, "big") + item * count


def filled(piece: bytes, head: bytes = b'{"type":"ping","x":[', tail: bytes = b"1]}") -> Text:
    return Text(head + piece * (MOST // len(piece) - 64) + tail)


HOSTILE = {
    "pairs": b"\xdf" + (MOST // 4).to_bytes(4, "big") + b"\xa1a\x00" * (MOST // 4),
    "nil keys": b"\xdf" + (MOST // 4).to_bytes(4, "big") + b"\xc0\x00" * (MOST // 4),
    "numbers": array(b"\x01"),
    "strings": array(b"\xa2xy"),
    "extensions": array(b"\xd4\x05\x00"),
    "empty arrays": array(b"\x90"),
    "one long key": msgpack.packb({"k" * (MOST - 64): 1}),
    "claims": b"\xdd\xff\xff\xff\xff" * 1000,
    "json pairs": filled(b',"a":1', b'{"a":1', b"}"),
    "json numbers": filled(b"1,"),
    "json fractions": filled(b"1e-9,"),
    "json strings": filled(b'"",'),
    "json quotes": filled(b'"', b"", b""),
    "json empty arrays": filled(b"[],"),
    "json brackets": filled(b"[", b"", b""),
    "json closing brackets": filled(b"]", b"", b""),
    "json white space": filled(b" ", b"", b"{}"),
    "json digits": filled(b"1", b'{"x":[', b"]}"),
    "json infinities": filled(b"Infinity", b'{"x":', b"}"),
    "json garbage": filled(b"x", b"", b""),
    "json escapes": filled(b"\\", b'{"a":"', b""),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_over_a_bound_is_refused_before_it_is_built(data: bytes, library: Library) -> None:
    codec = JSON if isinstance(data, Text) else MSGPACK
    with pytest.raises(DecodeError):
        codec.decode_client(data)
    assert library.sizes == []


LARGE = {
    "token ids": (generate(token_ids=IDS * 2), "token_ids", tuple(IDS * 2)),
    "a prompt": (generate(prompt="x" * 6_000_000), "prompt", "x" * 6_000_000),
    "a prompt with an emoji": (
        generate(prompt="x" * (WIDE_CHARS - 1) + "😀"),
        "prompt",
        "x" * (WIDE_CHARS - 1) + "😀",
    ),
    "a prompt of wide letters": (generate(prompt="漢" * 1_300_000), "prompt", "漢" * 1_300_000),
    "a prompt, escaped in JSON": (generate(prompt="é\n😀" * 400_000), "prompt", "é\n😀" * 400_000),
}


@CODEC_PAIR
@pytest.mark.parametrize(("frame", "field", "value"), LARGE.values(), ids=LARGE.keys())
def test_a_large_message_is_decoded_in_pieces(
    codec: Codec, frame: Any, field: str, value: object, library: Library
) -> None:
    data = message(codec, frame)
    library.sizes.clear()
    steps, count = codec.decoding(data), 0
    while True:
        try:
            next(steps)
        except StopIteration as done:
            request = done.value
            break
        count += 1
    assert isinstance(request, GenerateRequest)
    assert getattr(request, field) == value
    assert count >= len(data) // PIECE_BYTES - 1
    assert max(library.sizes) < PIECE_BYTES + 100


@CODEC_PAIR
def test_a_message_of_very_many_short_strings_is_walked_in_steps(codec: Codec) -> None:
    steps = codec.decoding(message(codec, {"type": "ping", "nonce": 1, "x": ["a", "b"] * 4000}))
    assert len(list(steps)) >= 1


@CODEC_PAIR
@pytest.mark.parametrize(
    ("frame", "words", "error"),
    [
        (generate(token_ids=[*IDS, -1]), ["token_ids[100000]", "-1", "0"], BadRequest),
        (generate(token_ids=[*IDS, 2**31]), ["token_ids[100000]", str(2**31)], BadRequest),
        (generate(token_ids=[*IDS, 1.5]), ["token_ids", "1024", "integers"], BadRequest),
        (generate(token_ids=IDS * 6), ["token_ids", "262144", "600000"], TooLarge),
        (generate(token_ids=IDS * 2, resume_token_ids=IDS * 2), ["resume_token_ids", "262144", "400000"], TooLarge),
        (generate(stop=["x"] * 10_000), ["stop", "8192", "entries"], BadRequest),
        (generate(prompt="x", stop="y" * 100_000), ["stop", "an array", "100000 characters"], BadRequest),
        (generate(prompt="x", stop_token_ids=IDS), ["stop_token_ids", "64", "100000"], BadRequest),
        (generate(prompt=IDS), ["prompt", "a string", "an array of 100000"], BadRequest),
        (generate(prompt="x", suffix="y" * 100_000), ["suffix", "not supported"], BadRequest),
        (generate(messages=[{"role": "u" * 100_000, "content": "x"}]), ["messages[0].role", "32"], BadRequest),
        (generate(prompt="x" * WIDE_CHARS + "😀"), ["prompt", "U+FFFF", str(WIDE_CHARS)], TooLarge),
        (generate(prompt="😀" + "x" * WIDE_CHARS), ["prompt", "U+FFFF", str(WIDE_CHARS)], TooLarge),
        (generate(prompt="x", **{"k" * 65: 1}), ["key", "64 characters"], BadRequest),
        (generate(prompt="x" * 100_000, **{"k" * 65: 1}), ["key", "64 characters"], BadRequest),
    ],
)
def test_a_large_value_that_is_wrong_is_named(
    codec: Codec, frame: Any, words: list[str], error: type[Exception]
) -> None:
    with pytest.raises(DecodeError) as caught:
        codec.decode_client(message(codec, frame))
    assert type(caught.value.error) is error
    assert [word for word in words if word not in caught.value.error.message] == []
    assert (caught.value.id, caught.value.fatal) == ("r1", False)


@CODEC_PAIR
def test_an_id_is_taken_from_the_frame_alone(codec: Codec) -> None:
    """What a message holds deeper down is no id, nor is one that comes after the fault known."""
    for frame in (
        {"type": "generate", "messages": [{"id": 5}], "token_ids": IDS * 11},
        {"type": "generate", "token_ids": IDS * 11, "id": 5},
        {"type": "generate", "id": [5], "token_ids": IDS * 11},
    ):
        with pytest.raises(DecodeError) as caught:
            codec.decode_client(message(codec, frame))
        assert caught.value.id is None


@CODEC_PAIR
def test_half_a_pair_of_surrogates_is_no_text(codec: Codec) -> None:
    text = "x" * 100_000 + "\ud83d"
    data = Text(json.dumps(generate(prompt=text)).encode())
    if codec is MSGPACK:
        data = msgpack.packb(generate(prompt=text), unicode_errors="surrogatepass")
    with pytest.raises(DecodeError, match="prompt: a text is not valid Unicode"):
        codec.decode_client(data)


def test_what_is_not_json_in_a_large_array_is_fatal() -> None:
    for entries in ("1," * 2000, "1,,", "01,", "1 2,", "--1,"):
        data = Text(b'{"x":[' + b"1," * 50_000 + entries.encode() + b"1" * (entries[:2] != "1,") + b"]}")
        with pytest.raises(DecodeError) as caught:
            JSON.decode_client(data)
        assert caught.value.fatal, entries


def test_numbers_that_json_does_not_have_stay_what_they_were() -> None:
    data = b'{"type":"ping","nonce":1,"a":-Infinity,"b":["-Infinity",Infinity,NaN],"c":"%s"}' % (b"x" * PIECE_BYTES)
    walk = JsonWalk(data, Tally(WireLimits()))
    assert list(walk.run()) != []
    loaded = json.loads(walk.rest, parse_constant=walk.constants())
    assert loaded["a"] == -float("inf")
    assert loaded["b"][:2] == ["-Infinity", float("inf")]
    assert loaded["c"] == Large("x" * PIECE_BYTES)
    assert JSON.decode_client(Text(data)) == Ping(1)


# The same walks with pieces so small that everything is cut.


@pytest.fixture(scope="module")
def tiny_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (json_walk, msgpack_walk):
            patch.setattr(module, "PIECE_BYTES", 40)
            patch.setattr(module, "SHORT_BYTES", 3)
        yield


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=12)
values = st.recursive(
    scalars | texts | ids,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts.map(lambda key: key[:5]), inner, max_size=4),
    max_leaves=12,
)
TIGHT = WireLimits(max_short_array=2)
FUZZ = settings(max_examples=300, deadline=None)


def plain(value: object) -> object:
    """With every value that was decoded in pieces put back."""
    if type(value) is Large:
        return value.value if isinstance(value.value, str) else list(value.value)
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def mixed(value: object) -> bool:
    """Whether it holds an array that begins with an integer, is long, and holds something else."""
    if isinstance(value, dict):
        return any(map(mixed, value.values()))
    if not isinstance(value, list):
        return False
    long = len(value) > 2 and type(value[0]) is int
    return (long and not all(type(entry) is int and 0 <= entry < 2**31 for entry in value)) or any(map(mixed, value))


@pytest.mark.usefixtures("tiny_pieces")
@FUZZ
@given(value=values, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_json_in_pieces_is_the_same(value: object, ascii: bool, indent: int | None) -> None:
    data = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    if not mixed(value):
        walk = JsonWalk(data, Tally(TIGHT))
        list(walk.run())
        assert plain(json.loads(walk.rest, parse_constant=walk.constants())) == json.loads(data)


@pytest.mark.usefixtures("tiny_pieces")
@FUZZ
@given(value=values)
def test_msgpack_in_pieces_is_the_same(value: object) -> None:
    data = msgpack.packb(value)
    if not mixed(value):
        walk = MsgpackWalk(data, Tally(TIGHT))
        list(walk.run())
        unpacked = msgpack.unpackb(walk.rest, ext_hook=walk.extension, strict_map_key=False)
        assert plain(unpacked) == msgpack.unpackb(data)


@pytest.mark.usefixtures("tiny_pieces")
@FUZZ
@given(data=st.binary(max_size=60), text=st.text('{}[]",:\\ueE+-.019 nulltrefasNIiy', max_size=60))
def test_whatever_is_sent_in_pieces_is_read_or_refused(data: bytes, text: str) -> None:
    for codec, sent in ((MsgpackCodec(TIGHT), data), (JsonCodec(TIGHT), Text(text.encode()))):
        try:
            codec.decode_client(sent)
        except DecodeError as problem:
            assert type(problem.error) in (BadRequest, TooLarge)  # noqa: PT017


@pytest.mark.usefixtures("tiny_pieces")
@FUZZ
@given(text=st.text('{}[]",:\\ud83e0Ee-.19 nul', max_size=60))
def test_json_in_pieces_is_refused_as_json_is(text: str) -> None:
    """What the library takes, the walk takes, and the other way round."""

    def loaded(load: Any) -> object:
        try:
            return load()
        except (ValueError, json_walk.Malformed, BadRequest):
            return ValueError

    def in_pieces() -> object:
        walk = JsonWalk(text.encode(), Tally(WireLimits()))
        list(walk.run())
        return plain(json.loads(walk.rest, parse_constant=walk.constants()))

    whole = loaded(lambda: json.loads(text))
    try:
        json.dumps(whole, ensure_ascii=False).encode() if whole is not ValueError else b""
    except UnicodeEncodeError:  # half a surrogate pair is refused in pieces
        return
    assert loaded(in_pieces) == whole
