"""Prompts as text of an exact number of tokens, for servers that take no token ids."""

import re
from pathlib import Path

import tokenizers

_WORD = re.compile("Ġ[a-z]{3,}")  # how a byte-level vocabulary writes a space and a word


class TextPrompts:
    """Each id of a prompt stands for one word, which this model's tokenizer makes one token of.

    The work is the same as with ids; the ids are not. A tokenizer that adds special tokens (BOS) of its own is given
    that many words fewer.
    """

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json. Raises ValueError where that cannot be done, or it has no such words."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (tokenizers raises nothing else)
            raise ValueError(f"{path}: not a tokenizer ({error})") from None
        words = [" " + token[1:] for token in sorted(tokenizer.get_vocab()) if _WORD.fullmatch(token)]
        encoded = tokenizer.encode_batch(words, add_special_tokens=False)
        self._words = [word for word, each in zip(words, encoded, strict=True) if len(each.ids) == 1]
        self._specials = tokenizer.num_special_tokens_to_add(False)
        if not self._words:
            raise ValueError(f"{path}: no token is a space and a word; the vocabulary must be byte-level")

    def __call__(self, prompt_ids: tuple[int, ...]) -> str:
        """Text of as many tokens as there are ids."""
        return "".join(self._words[id_ % len(self._words)] for id_ in prompt_ids[self._specials :])
