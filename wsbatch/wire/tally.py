"""What one message from a client may hold, counted in its bytes before anything is built. Both syntaxes count here.

The walks over a message (`msgpack_walk`, `json_walk`) are generators: each `yield` comes after a piece of work that
takes a millisecond or so, so that whoever runs one can let others have their turn in between. What is large is decoded
in such pieces too; the rest, whose size is bounded, is left to the library in one call.
"""

from wsbatch.errors import BadRequest, RequestError, TooLarge
from wsbatch.wire.fields import MAX_TOKEN_ID, Large, WireLimits, shown

PIECE_BYTES = 65_536
"""A message up to this size is decoded in one call, a longer one in pieces of this size."""
PIECE_ENTRIES = 4096
SHORT_BYTES = 64
"""In a message that is decoded in pieces, a longer string is a value of its own, so that the rest is small."""

_MAX_KEY_CHARS = 64
_KEY_TOO_LONG = f"the key of a map may have {_MAX_KEY_CHARS} characters"
_ESCAPED_BYTES = 12  # of a character in JSON, at most; in UTF-8 it has fewer


class Tally:
    """Counts of one message. Every method raises the error of the bound that it finds broken, BadRequest or TooLarge.

    Attributes:
        field: the key at the top of the frame that the walk is at, for the errors.
    """

    def __init__(self, limits: WireLimits) -> None:
        self.field = ""
        self._limits = limits
        self._containers = self._entries = self._strings = self._ids = 0

    def open(self, depth: int) -> None:
        """A map or an array begins, within `depth` others."""
        self._containers += 1
        if self._containers > self._limits.max_containers:
            raise BadRequest(f"a message may have {self._limits.max_containers} maps and arrays")
        if depth >= self._limits.max_depth:
            raise BadRequest(
                f"the message is nested too deeply: {self._limits.max_depth} maps and arrays in each other"
            )

    def entries(self, count: int) -> None:
        """So many values stand in maps and arrays: not the first of each, nor those of a long array."""
        self._entries += count
        if self._entries > self._limits.max_entries:
            most = self._limits.max_entries
            raise self.wrong(f"a message may have {most} entries in maps and arrays, beside its token ids")

    def string(self) -> None:
        """A string begins. Well-formed messages meet the bound on entries first."""
        self._strings += 1
        if self._strings > 2 * self._limits.max_entries:
            raise BadRequest(f"a message may have {2 * self._limits.max_entries} strings")

    def is_long(self, count: int) -> bool:
        """Whether an array of so many entries is a long one: if it begins with an integer, it must be of token ids."""
        return count > self._limits.max_short_array

    def ids(self, count: int) -> None:
        """So many values stand in a long array."""
        self._ids += count
        if self._ids > self._limits.max_token_ids:
            most = self._limits.max_token_ids
            raise self.wrong(f"a message may have {most} token ids, got {self._ids}", TooLarge)

    def wide_chars(self, count: int) -> None:
        """A text with a character beyond U+FFFF has so many characters."""
        most = self._limits.max_wide_chars
        if count > most:
            raise self.wrong(f"a text with characters beyond U+FFFF may have {most} characters", TooLarge)

    def key(self, size: int) -> None:
        """A map's key takes so many bytes, which may be escapes."""
        if size > _ESCAPED_BYTES * _MAX_KEY_CHARS:
            raise BadRequest(_KEY_TOO_LONG)

    def check_ids(self, ids: list[int], first: int) -> None:
        """These integers are token ids; they follow on the first so many of their array."""
        if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
            at = next(index for index, value in enumerate(ids) if not 0 <= value <= MAX_TOKEN_ID)
            raise BadRequest(f"{self.field}[{first + at}]: must be from 0 to {MAX_TOKEN_ID}, got {shown(ids[at])}")

    def not_ids(self) -> RequestError:
        """The error of a long array that holds something else than integers."""
        most = self._limits.max_short_array
        return self.wrong(f"an array of more than {most} entries may hold integers only")

    def wrong(self, message: str, error: type[RequestError] = BadRequest) -> RequestError:
        """An error that names the field."""
        return error(f"{self.field}: {message}" if self.field else message)


class LongText:
    """A text that is decoded in parts, and joined at last."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._parts: list[str] = []
        self._chars = 0
        self._wide = False  # whether any character so far is beyond U+FFFF

    def add(self, part: str) -> None:
        """The next part. Raises BadRequest for half a surrogate pair, TooLarge for too many characters."""
        self._parts.append(part)
        self._chars += len(part)
        if not part.isascii():
            try:
                units = len(part.encode("utf-16-le")) // 2
            except UnicodeEncodeError:
                raise self._tally.wrong("a text is not valid Unicode: it has half a surrogate pair") from None
            self._wide = self._wide or units > len(part)
        if self._wide:
            self._tally.wide_chars(self._chars)

    def joined(self) -> Large:
        """All of it."""
        return Large("".join(self._parts))


class Pairs:
    """Makes maps of their pairs, and notes the first key that is no string, is too long, or comes twice."""

    def __init__(self) -> None:
        self.problem: str | None = None

    def map(self, pairs: list[tuple[object, object]]) -> dict[str, object]:
        """The map of these pairs; a hook of both libraries."""
        values: dict[str, object] = {}
        for key, value in pairs:
            if type(key) is str and key not in values and len(key) <= _MAX_KEY_CHARS:
                values[key] = value
            elif type(key) is str and key in values:
                values[key] = None  # which of the two was meant is unknown, above all for an id
                self.problem = self.problem or f"{shown(key)}: is there twice"
            elif self.problem is None:
                is_string = type(key) in (str, Large)
                self.problem = _KEY_TOO_LONG if is_string else f"the keys of a map must be strings, got {shown(key)}"
        return values
