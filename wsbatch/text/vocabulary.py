"""What each id of a tokenizer adds to a text."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from wsbatch.text.detokenize import BYTE, PLAIN, SILENT, ByteDetokenizer, Detokenizer, WindowDetokenizer


class Vocabulary:
    """The tokens by id, as both kinds of detokenizer read them.

    Args:
        tokens: id by token.
        special: ids without text.
        decoder: the decoder in `tokenizer.json`; None where there is none.

    Attributes:
        kinds: by id; special tokens and gaps are SILENT.
        max_token_bytes: the UTF-8 length of the longest token.
    """

    def __init__(self, tokens: Mapping[str, int], special: frozenset[int], decoder: dict[str, Any] | None) -> None:
        stages = list(_stages(decoder))
        byte_level = stages == ["ByteLevel"]
        self._joins_bytes = "ByteLevel" in stages
        pieces = {token: _piece(token) if byte_level else token.encode() for token in tokens}
        self.max_token_bytes = max([1, *map(len, pieces.values())])
        kinds = bytearray([SILENT]) * (max(tokens.values(), default=-1) + 1)
        table = [b""] * len(kinds)
        for token, id_ in tokens.items():
            if token and id_ not in special:
                kinds[id_] = BYTE if "ByteFallback" in stages and _is_byte(token) else PLAIN
                table[id_] = pieces[token]
        self.kinds = bytes(kinds)
        self._pieces = table if byte_level else None

    def detokenizer(self, decode: Callable[[list[int]], str]) -> Detokenizer:
        """For one output. `decode` gives the text of ids where tokens are more than bytes to be joined."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(decode, self.kinds, hold_replacement=self._joins_bytes)


def _stages(decoder: dict[str, Any] | None) -> Iterator[str]:
    """The types of decoder that ids go through; a sequence is flattened."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for stage in decoder["decoders"]:
            yield from _stages(stage)
    else:
        yield decoder["type"]


def _is_byte(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order (Radford et al. 2019,
    GPT-2's encoder).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _piece(token: str) -> bytes:
    """A token of a byte-level vocabulary as bytes; an added token with other characters is its own UTF-8."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()
