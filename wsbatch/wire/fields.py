"""Readers: check one value from a frame against its type and its bound, and say which field was wrong.

A reader takes a field's name and its decoded value, and returns the value a message carries or raises `BadRequest`
(`TooLarge` for a size) naming the field, the value and the bound. It takes what a message carries, too: requests made
in this process are read by the same readers. `frames` and `generate` have the tables of who reads what.
"""

from array import array as array_of
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from wsbatch.errors import BadRequest, RequestError, TooLarge
from wsbatch.messages import ChatMessage, RequestId, RowPhase, TokenLogprobs

Reader: TypeAlias = Callable[[str, object], Any]

# Integers above this are not exact in JavaScript, and msgpack and JSON clients there would change them silently.
MAX_SAFE_INTEGER = 2**53 - 1
MAX_TOKEN_ID = 2**31 - 1

_ECHOED_CHARS = 40
# Python may refuse to write out an integer of more than 640 digits.
_SHOWN_BITS = 1700


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bounds on what a client may send. A model's own context is checked later, at admission.

    Attributes:
        max_message_bytes: one message; JSON text is counted as UTF-8.
        max_containers: maps and arrays in one message, nested ones included: a decoded container costs fifty times
            its encoded size, and the decoder runs on the event loop.
        max_depth: maps and arrays within each other.
        max_entries: values in the maps and arrays of one message: not the first of each, nor those of long arrays.
        max_short_array: entries of an array; one that is longer, and begins with an integer, is a long one: it may hold
            nothing but token ids.
        max_id_bytes: a request id or nonce that is a string.
        max_token_ids: entries of `token_ids` and of `resume_token_ids`, and of all long arrays in a message. At
            last they become objects, all at once, for which the event loop stands still for 7 ms.
        max_wide_chars: characters of a text that has any beyond U+FFFF. Each then takes four bytes of memory, and all
            are written at once.
        max_messages: turns in `messages`.
        max_tokens: the field of that name.
        max_stop, max_stop_chars, max_stop_token_ids: stop strings, characters of each, stop ids.
        max_logprobs: the field `logprobs`.
        max_timeout_ms: both timeouts.
    """

    max_message_bytes: int = 8 * 2**20
    max_containers: int = 4096
    max_depth: int = 100
    max_entries: int = 8192
    max_short_array: int = 1024
    max_id_bytes: int = 64
    max_token_ids: int = 262_144
    max_wide_chars: int = 4 * 2**20
    max_messages: int = 1024
    max_tokens: int = 1_000_000
    max_stop: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_timeout_ms: int = 86_400_000


@dataclass(frozen=True, slots=True)
class Large:
    """A value that was decoded in pieces, and checked piece by piece: valid Unicode, or token ids within bounds.

    Ids are packed here. As objects made piece by piece, with those of others in between, they would leave their memory
    in fragments when they go.
    """

    value: "str | array_of[int]"


class TokenIds(tuple[int, ...]):
    """Token ids that were checked: whoever reads them again need not look at each."""


_ARRAYS = (list, tuple, array_of, TokenIds)


def whole(value: object) -> Any:
    """The value itself, however it was decoded."""
    return value.value if type(value) is Large else value


def shown(value: object) -> str:
    """A value for an error message: short, printable, and naming its wire type."""
    value = whole(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= _ECHOED_CHARS else f"{value[:_ECHOED_CHARS]!r}… ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "an integer of over 500 digits"
    if isinstance(value, (int, float)):
        digits = repr(value)
        return digits if len(digits) <= _ECHOED_CHARS else f"{digits[:_ECHOED_CHARS]}…"
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, _ARRAYS) and type(value) in _ARRAYS:
        return f"an array of {len(value)}"
    if isinstance(value, bytes):
        return "binary data"
    kind = type(value)
    return "a msgpack extension" if kind.__module__.startswith("msgpack") else f"an object of type {kind.__name__}"


def read_fields(
    frame: Mapping[str, object], readers: Mapping[str, Reader], *, required: tuple[str, ...] = (), prefix: str = ""
) -> dict[str, Any]:
    """The values of a map's fields, by name; one that is null counts as absent."""
    values = {}
    for name, read in readers.items():
        value = frame.get(name)
        if value is not None:
            values[name] = read(prefix + name, value)
        elif name in required:
            raise BadRequest(f"{prefix}{name}: is required")
    return values


def wrong_type(name: str, value: object, wanted: str) -> BadRequest:
    return BadRequest(f"{name}: must be {wanted}, got {shown(value)}")


def integer(low: int, high: int) -> Reader:
    """An integer from `low` to `high`, both included. Booleans and floats (even whole ones) are not integers."""

    def read(name: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, value, "an integer")
        if not low <= value <= high:
            raise BadRequest(f"{name}: must be from {low} to {high}, got {shown(value)}")
        return value

    return read


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """A finite number from `low` (excluded if `above`) to `high`."""

    def read(name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(name, value, "a number")
        # NaN fails every comparison, so it ends here with the rest.
        if not low <= value <= high or (above and value == low):
            raise BadRequest(f"{name}: must be {'above' if above else 'from'} {low} to {high}, got {shown(value)}")
        return float(value)

    return read


def boolean(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise wrong_type(name, value, "true or false")
    return value


def string(*, low: int = 0, high: int | None = None) -> Reader:
    """A string of `low` to `high` characters, all of them Unicode scalar values (no lone surrogates)."""

    def read(name: str, value: object) -> str:
        text = whole(value)
        if not isinstance(text, str):
            raise wrong_type(name, text, "a string")
        if len(text) < low:
            raise BadRequest(f"{name}: must not be empty")
        if high is not None and len(text) > high:
            raise BadRequest(f"{name}: must be at most {high} characters, got {shown(text)}")
        if value is text and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise BadRequest(f"{name}: is not valid Unicode at character {exc.start}") from None
        return text

    return read


def array(read_item: Reader, *, low: int = 0, high: int | None = None) -> Reader:
    """An array of `low` to `high` items, as a tuple."""

    def read(name: str, value: object) -> tuple[Any, ...]:
        items = _items(name, value, low=low, high=high)
        return tuple([read_item(f"{name}[{i}]", item) for i, item in enumerate(items)])

    return read


def token_ids(*, low: int = 0, high: int | None = None) -> Reader:
    """An array of token ids: `array(integer(0, MAX_TOKEN_ID))`, but checked at C speed: prompts are long.

    More than `high` of them are TooLarge.
    """
    one_by_one = array(integer(0, MAX_TOKEN_ID))

    def read(name: str, value: object) -> TokenIds:
        items = _items(name, value, low=low, high=high, error=TooLarge)
        if type(items) is TokenIds:
            return items
        checked = not items or type(value) is Large
        if not checked and (set(map(type, items)) != {int} or min(items) < 0 or max(items) > MAX_TOKEN_ID):
            one_by_one(name, items)  # raises, naming the first offender
        return TokenIds(items)

    return read


def _items(
    name: str, value: object, *, low: int = 0, high: int | None = None, error: type[RequestError] = BadRequest
) -> Sequence[Any]:
    items: Sequence[Any] = whole(value)
    if type(items) not in _ARRAYS:
        raise wrong_type(name, items, "an array")
    if len(items) < low:
        raise BadRequest(f"{name}: must not be empty")
    if high is not None and len(items) > high:
        raise error(f"{name}: must have at most {high} entries, got {len(items)}")
    return items


def identifier(max_bytes: int) -> Reader:
    """A request id or a nonce: a safe integer, or a string of 1 to `max_bytes` UTF-8 bytes."""
    read_integer = integer(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    read_string = string(low=1)

    def read(name: str, value: object) -> RequestId:
        if type(value) is int:
            return read_integer(name, value)  # type: ignore[no-any-return]
        if type(whole(value)) is not str:
            raise wrong_type(name, value, "an integer or a string")
        text: str = read_string(name, value)
        if len(text.encode()) > max_bytes:
            raise BadRequest(f"{name}: must be at most {max_bytes} bytes, got {shown(text)}")
        return text

    return read


def chat_message(name: str, value: object) -> ChatMessage:
    """One turn. The role is a bare word: chat templates write it between control tokens."""
    if type(value) is ChatMessage:
        value = {"role": value.role, "content": value.content}
    if type(value) is not dict:
        raise wrong_type(name, value, "a map with role and content")
    for key in ("role", "content"):
        if value.get(key) is None:
            raise BadRequest(f"{name}.{key}: is required")
    role = _role(f"{name}.role", value["role"])
    if not (role.isascii() and role.isidentifier()):
        raise BadRequest(f"{name}.role: must be a word such as system, user or assistant, got {shown(role)}")
    return ChatMessage(role=role, content=_content(f"{name}.content", value["content"]))


def token_logprobs(name: str, value: object) -> TokenLogprobs:
    """`[own, [[token id, logprob], ...]]` for one token."""
    own, top = _pair(name, value)
    pairs = [_pair(name, item) for item in _items(name, top)]
    return _logprob(name, own), tuple([(_token_id(name, token_id), _logprob(name, p)) for token_id, p in pairs])


def batch_row(name: str, value: object) -> tuple[int, int, RowPhase]:
    """`[slot, key, phase]` of one row of a step. A phase of a newer version passes."""
    if type(value) is not list or len(value) != 3:
        raise wrong_type(name, value, "an array of three")
    return _counted(name, value[0]), _counted(name, value[1]), _content(name, value[2])


def _pair(name: str, value: object) -> tuple[object, object]:
    if type(value) is not list or len(value) != 2:
        raise wrong_type(name, value, "an array of two")
    return value[0], value[1]


_role = string(low=1, high=32)
_content = string()
_counted = integer(0, MAX_SAFE_INTEGER)
_token_id = integer(0, MAX_TOKEN_ID)
_logprob = number(-1e9, 1e9)
