"""Token ids to text, one id at a time, and the stop strings that end a text. No tokenizer library here."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns one output's ids into text as they come.

    What `push` and `flush` return, put together, is exactly the codec's `decode` of all ids pushed, or, after a prompt
    (`continuing`), what they add to it. Text that a later id could still change (half a character) is held back, so
    nothing that was returned is ever taken back.
    """

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; often "" inside a character. An id outside the vocabulary and
        a special token have no text."""
        ...

    def flush(self) -> str:
        """The text held back. The output is over: push nothing afterwards."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings (byte-level BPE): look the bytes up, decode UTF-8 incrementally.

    `tokenizers.decoders.DecodeStream` does this too, but has no flush and, once bytes are invalid, may raise.

    Args:
        pieces: the bytes of each id; b"" for ids without text. Shared between detokenizers.
    """

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        # Invalid bytes become U+FFFD by the same rule (one for each maximal subpart) as in Rust's from_utf8_lossy.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        return self._decode(self._pieces[token_id]) if token_id < len(self._pieces) else ""

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(b"", True)


SILENT, BYTE, PLAIN = range(3)  # kinds of token ids: no text; one byte of a run of bytes; anything else


class WindowDetokenizer:
    """For every other vocabulary: decode the new id behind the one before it and return what that adds.

    Two ids are context enough, because decoders treat only the first token specially (a leading space goes) and look
    no further than one token back. Runs of byte tokens (`<0xE2>`) are the exception: one invalid byte turns a whole
    run into U+FFFD, so a run is held back until the token that ends it. Decoding the window by hand and not through
    `tokenizers.decoders.DecodeStream`: on random ids with byte tokens that raised or was wrong two times in three
    (tokenizers 0.23).

    Args:
        decode: ids to text, special tokens skipped.
        kinds: SILENT, BYTE or PLAIN for each id. Shared between detokenizers.
        hold_replacement: hold text back while it ends in U+FFFD, for decoders that join bytes across tokens.
    """

    __slots__ = ("_decode", "_hold_replacement", "_kinds", "_sent", "_window")

    def __init__(self, decode: Callable[[list[int]], str], kinds: bytes, *, hold_replacement: bool) -> None:
        self._decode = decode
        self._kinds = kinds
        self._hold_replacement = hold_replacement
        self._window: list[int] = []  # the last id whose text was returned, and those since
        self._sent = 0  # characters of the window's text that were returned

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        kind = self._kinds[token_id] if token_id < len(self._kinds) else SILENT
        if kind == SILENT:
            return ""
        self._window.append(token_id)
        if kind == BYTE:
            return ""
        text = self._decode(self._window)
        if self._hold_replacement and text.endswith("\ufffd"):
            return ""
        added = text[self._sent :]
        self._window = [token_id]
        self._sent = len(self._decode(self._window))
        return added

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(self._window)[self._sent :]


_TAIL_IDS = 4  # a character has at most four bytes, and no token with text has none


def continuing(
    detokenizer: Detokenizer, prompt_ids: Sequence[int], *, kinds: bytes, decode: Callable[[list[int]], str]
) -> Detokenizer:
    """`detokenizer`, which is new, for the output that follows a prompt: its text is what the output adds.

    That is the decoded whole without the beginning that it shares with the decoded prompt. They share all of the
    prompt, unless its ids end within a character. Only the prompt's tail is decoded: what comes before the last few
    ids and before a run of bytes at the end cannot change the rest.

    Args:
        detokenizer: nothing was pushed to it yet.
        prompt_ids: of the prompt; where none has text, the output's text is that of its own ids.
        kinds: SILENT, BYTE or PLAIN for each id.
        decode: ids to text, special tokens skipped.
    """
    tail: list[int] = []
    plain = 0
    for token_id in reversed(prompt_ids):
        kind = kinds[token_id] if token_id < len(kinds) else SILENT
        if kind != SILENT:
            tail.append(token_id)
        plain += kind == PLAIN
        if plain == _TAIL_IDS:
            break
    tail.reverse()
    certain = "".join(map(detokenizer.push, tail))
    held = decode(tail)[len(certain) :]
    return _Addition(detokenizer, held) if held else detokenizer


class _Addition:
    """Leaves out what the prompt's text ended with, when the detokenizer, which held it back, returns it."""

    __slots__ = ("_detokenizer", "_held")

    def __init__(self, detokenizer: Detokenizer, held: str) -> None:
        self._detokenizer = detokenizer
        self._held = held

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        return self._added(self._detokenizer.push(token_id))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._added(self._detokenizer.flush())

    def _added(self, text: str) -> str:
        both = zip(self._held, text, strict=False)
        shared = next((at for at, (held, new) in enumerate(both) if held != new), min(len(self._held), len(text)))
        if shared < len(text):
            self._held = ""  # the output has begun
        else:
            self._held = self._held[shared:]
        return text[shared:]


class StopText:
    """Cuts a text, which arrives in pieces, before the first stop string in it.

    The first stop string is the one that is complete first, whichever way the text is cut into pieces; of several
    complete at the same character, the longest. Text that may be the beginning of a stop string is held back until it
    cannot be. One pass of the automaton of Aho and Corasick (1975, "Efficient string matching"): linear in the text.

    Args:
        stops: the stop strings; () stops nowhere.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_depth", "_fail", "_found", "_match", "_next", "_origin", "_state")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise ValueError("stop must not hold an empty string: it would end every text before its first character")
        # A state is a prefix of a stop string, 0 the empty one.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # its length: what is held back in that state
        self._origin = [""]  # a stop string that begins with it
        self._match = [0]  # length of the longest stop string that it ends with; 0 for none
        self._fail = [0]  # its longest proper suffix that is a state
        self._state = 0
        self._found = False
        for stop in stops:
            self._add(stop)
        self._link()

    def push(self, delta: str) -> tuple[str, bool]:
        """Take the next piece of text.

        Returns:
            The text that is now safe to send, and whether a stop string has been found (it and what follows are not
            text any more: later calls return nothing).
        """
        if self._found:
            return "", True
        if len(self._next) == 1:
            return delta, False
        before, state = self._state, self._state
        for end, character in enumerate(delta, 1):
            while state and character not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(character, 0)
            if self._match[state]:
                self._found, self._state = True, 0
                return self._release(before, delta, self._depth[before] + end - self._match[state]), True
        self._state = state
        return self._release(before, delta, self._depth[before] + len(delta) - self._depth[state]), False

    def flush(self) -> str:
        """The text held back, "" once a stop string was found. The text is over: push nothing afterwards."""
        return self._origin[self._state][: self._depth[self._state]]

    def _release(self, before: int, delta: str, length: int) -> str:
        """The first `length` characters of what was held back in state `before` followed by `delta`."""
        held = self._depth[before]
        return self._origin[before][: min(length, held)] + delta[: max(length - held, 0)]

    def _add(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(depth)
                self._origin.append(stop)
                self._match.append(0)
                self._fail.append(0)
            state = following
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Fill `_fail` and complete `_match`, shortest states first: each is made from shorter ones."""
        queue = list(self._next[0].values())
        for state in queue:  # grows as it is walked
            for character, following in self._next[state].items():
                fallback = self._fail[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._next[fallback].get(character, 0)
                queue.append(following)
            self._match[state] = self._match[state] or self._match[self._fail[state]]
