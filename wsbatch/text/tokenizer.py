"""A model's fast tokenizer, which keeps a user's text and a template's text apart. Imports `tokenizers`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.normalizers import Normalizer

from wsbatch.text.detokenize import Detokenizer, continuing
from wsbatch.text.tokenizer_files import TokenizerFiles
from wsbatch.text.vocabulary import Vocabulary


class Found(NamedTuple):
    """The literal of a special token in a text, from character `start` up to `end`, with white space it swallows."""

    start: int
    end: int
    token_id: int


class Tokenizer:
    """Ids from text and text from ids.

    Encoding goes through the batch call, even for one text. `encode` holds the GIL throughout: with a text of 5 MB in
    another thread, a thread that ticks stood still for 4.4 s; with `encode_batch` for 0.24 s (freeing the offsets),
    with `encode_batch_fast` for 0.05 s (making the list of ids; 5 ms for the 600 kB that a context of 8k tokens lets
    through).

    Args:
        files: of the model.

    Attributes:
        eos_token_ids: ids that end an output.
        max_token_bytes: the UTF-8 length of the longest token.
        edges: the characters with which the literal of a special token begins or ends.

    Raises:
        ValueError: `tokenizer.json` cannot be read.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._spelling = _load(files)
        self._spelling.encode_special_tokens = True  # whatever the name says: literals of special tokens are spelled
        self._marking = _load(files)
        tokens = self._spelling.get_vocab()
        special = {id_: token for id_, token in self._spelling.get_added_tokens_decoder().items() if token.special}
        eos_token = files.names.get("eos_token")
        self.eos_token_ids = files.eos_token_ids | {id_ for token, id_ in tokens.items() if token == eos_token}
        self.edges = frozenset(edge for token in special.values() for edge in (token.content[0], token.content[-1]))
        # What no user's text may become. An unknown word is the unknown token, and may be.
        self._control = frozenset(special) - (_unknown_ids(files.pipeline["model"], tokens) - self.eos_token_ids)
        self._scanner = _scanner(special.values(), self._spelling.normalizer)
        self._found_ids = {self._scanner.token_to_id(token.content): id_ for id_, token in special.items()}
        self._before, self._after = _affixes(self._spelling)
        self._vocabulary = Vocabulary(tokens, frozenset(special), files.pipeline.get("decoder"))
        self.max_token_bytes = self._vocabulary.max_token_bytes

    def spell(self, text: str) -> list[int]:
        """A user's text as ids, none of them a special token (but the unknown token, for an unknown word)."""
        ids = self._spelling.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids if self._control.isdisjoint(ids) else self._respell(text)

    def parse(self, text: str) -> list[int]:
        """A text as ids, the literals of special tokens in it being these tokens."""
        ids: list[int] = self._marking.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def surround(self, ids: list[int]) -> list[int]:
        """With the special tokens that the tokenizer puts around every text, such as BOS; each of them once."""
        before = [] if ids[: len(self._before)] == self._before else self._before
        after = [] if ids[max(0, len(ids) - len(self._after)) :] == self._after else self._after
        return [*before, *ids, *after]

    def mark(self, text: str, found: Sequence[Found]) -> list[int] | None:
        """A template's text as ids, the special tokens in it, which `find` has found, recognised.

        None if there would be others: a model (Unigram, WordLevel) may take their literals for words, and a normalizer
        may make one.
        """
        ids = self.parse(text)
        expected = [each.token_id for each in found if each.token_id in self._control]
        return ids if [id_ for id_ in ids if id_ in self._control] == expected else None

    def find(self, texts: Sequence[str]) -> list[list[Found]]:
        """The literals of special tokens in each text, in order."""
        return [
            [
                Found(start, end, self._found_ids[id_])
                for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
                if id_ in self._found_ids
            ]
            for encoding in self._scanner.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Ids as text; special tokens and ids outside the vocabulary are skipped."""
        return self._spelling.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For one output, which continues these ids."""
        detokenizer = self._vocabulary.detokenizer(self.decode)
        return continuing(detokenizer, prompt_ids, kinds=self._vocabulary.kinds, decode=self.decode)

    def _respell(self, text: str) -> list[int]:
        """`spell`, with what would be a special token spelled by characters, and left out where one is that token."""
        encoding = self._spelling.encode_batch([text], add_special_tokens=False)[0]
        ids: list[int] = []
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id_ not in self._control:
                ids.append(id_)
                continue
            for character in self._spelling.encode_batch_fast(list(text[start:end]), add_special_tokens=False):
                ids += [each for each in character.ids if each not in self._control]
        return ids


def _load(files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(files.path))
    except Exception as error:  # `tokenizers` raises nothing more special
        raise ValueError(f"{files.path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    ends = {literal for literal in added if tokenizer.token_to_id(literal) in files.eos_token_ids}
    for literal in sorted(files.special | ends):
        if tokenizer.token_to_id(literal) is None:
            continue  # named in a config, but no token of this model
        token = added.get(literal, tokenizers.AddedToken(literal, normalized=False))
        token.special = True
        tokenizer.add_special_tokens([token])
    return tokenizer


def _unknown_ids(model: dict[str, Any], vocabulary: dict[str, int]) -> set[int]:
    """The id that the model puts for what it has no token for, if any. Unigram gives an id, the others a token."""
    ids = {model.get("unk_id"), vocabulary.get(model.get("unk_token") or "")}
    return {id_ for id_ in ids if id_ is not None}


def _scanner(special: Iterable[tokenizers.AddedToken], normalizer: Normalizer | None) -> tokenizers.Tokenizer:
    """Finds literals exactly as the tokenizer does (longest first, with its flags), and does nothing else."""
    scanner = tokenizers.Tokenizer(WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        scanner.normalizer = normalizer
    scanner.add_special_tokens(list(special))
    return scanner


def _affixes(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that it puts before and after every text."""
    probe = tokenizer.encode("a")
    own = [index for index, added in enumerate(probe.special_tokens_mask) if not added] or [len(probe.ids)]
    return probe.ids[: own[0]], probe.ids[own[-1] + 1 :]
