"""Text to token ids and back. `tokenizers` and `jinja2` are imported only once a `HuggingFaceText` is made."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from wsbatch.errors import BadRequest
from wsbatch.messages import ChatMessage
from wsbatch.text.detokenize import PLAIN, ByteDetokenizer, Detokenizer, continuing
from wsbatch.text.tokenizer_files import TokenizerFiles

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class TextCodec(Protocol):
    """What the engine needs to know about a model's text. Safe to use from several threads at once.

    Attributes:
        max_token_bytes: the UTF-8 length of the longest token: a text of n bytes is at least n / max_token_bytes
            tokens, which tells before tokenizing that it cannot fit. (Not where a tokenizer drops or contracts text,
            as with an unknown word that is one token: there the bound is a limit on size.)
        eos_token_ids: ids that end an output.
    """

    max_token_bytes: int
    eos_token_ids: frozenset[int]

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """A prompt as ids, with what the tokenizer puts around every text (BOS). Takes long for a long text.

        The text is a user's: the literal of a special token in it is spelled out, never that token, unless
        `parse_special` is true. Then what the text begins or ends with is not put there again.

        Raises:
            BadRequest: it is not valid Unicode.
        """
        ...

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation as ids, by the model's chat template, ready for the assistant's next turn.

        Special tokens come from the template alone; nothing that a message holds becomes one.

        Raises:
            BadRequest: no messages, an unknown role, no chat template, or the template does not accept them.
        """
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """Ids as text; special tokens and ids outside the vocabulary are skipped, invalid bytes become U+FFFD."""
        ...

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """For one output: its text is what it adds to that of `prompt_ids`, or, without them, that of its own ids.

        The two differ where decoders treat the first token specially: SentencePiece's lose its leading space.
        """
        ...


class ByteText(TextCodec):
    """The text of the simulated model: ids 0 to 255 are bytes, 256 ends an output."""

    max_token_bytes = 1
    eos_token_ids = frozenset({256})
    _pieces = (*(bytes([byte]) for byte in range(256)), b"")
    _kinds = bytes([PLAIN]) * 256

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `TextCodec`; no special token has a literal."""
        return list(_utf8(text, "prompt"))

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See `TextCodec`; one line a turn."""
        _check(messages)
        turns = "".join(f"{message.role}: {message.content}\n" for message in messages)
        return list(f"{turns}assistant: ".encode())

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `TextCodec`."""
        return bytes(token_id for token_id in token_ids if token_id < 256).decode("utf-8", "replace")

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """See `TextCodec`."""
        return continuing(ByteDetokenizer(self._pieces), prompt_ids, kinds=self._kinds, decode=self.decode)


class HuggingFaceText(TextCodec):
    """The text of a model in a Hugging Face directory: `tokenizer.json` and the files beside it.

    Special tokens are those that `tokenizer.json` flags as special, those that the configs name or list as such, and
    added tokens that end an output. An added token that is none of these (`<think>` in many vocabularies) is text like
    any other, as it is for transformers.

    Args:
        directory: a local directory.

    Raises:
        FileNotFoundError: there is no `tokenizer.json` in it.
        ValueError: a file in it cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        from wsbatch.text.chat_template import ChatTemplate
        from wsbatch.text.tokenizer import Tokenizer

        files = TokenizerFiles.read(Path(directory))
        self._tokenizer = Tokenizer(files)
        try:
            self._template = ChatTemplate(files.template, files.names) if files.template is not None else None
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error
        self.max_token_bytes = self._tokenizer.max_token_bytes
        self.eos_token_ids = self._tokenizer.eos_token_ids

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `TextCodec`."""
        _utf8(text, "prompt")
        tokenizer = self._tokenizer
        return tokenizer.surround(tokenizer.parse(text) if parse_special else tokenizer.spell(text))

    def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See `TextCodec`.

        The rendered text is encoded as a whole, as transformers' `apply_chat_template` does, and gives the same ids.
        Only where a message holds the literal of a special token, the text is encoded in the pieces between the
        template's own special tokens, the message's literals spelled out.
        """
        _check(messages)
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; send prompt or token_ids instead")
        placeholders = _Placeholders()
        text = self._template.render(self._hide_literals(messages, placeholders))
        found = self._tokenizer.find([placeholders.mask(text)])[0]
        hidden = self._hide_edges(messages, placeholders)
        if hidden != tuple(messages):
            # Could a message make a special token together with the template's words, or with another message? Then
            # fewer are found where messages cannot contribute; that text is safe and is used, although the template
            # did not see the characters hidden in it.
            alone = self._template.render(hidden)
            found_alone = self._tokenizer.find([placeholders.mask(alone)])[0]
            if [each.token_id for each in found_alone] != [each.token_id for each in found]:
                text, found = alone, found_alone
        if not placeholders.occur_in(text) and (ids := self._tokenizer.mark(text, found)) is not None:
            return ids
        ids, end = [], 0
        for each in found:
            ids += [*self._tokenizer.spell(placeholders.restore(text[end : each.start])), each.token_id]
            end = each.end
        return ids + self._tokenizer.spell(placeholders.restore(text[end:]))

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `TextCodec`."""
        return self._tokenizer.decode(token_ids)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """See `TextCodec`."""
        return self._tokenizer.detokenizer(prompt_ids)

    def _hide_literals(self, messages: Sequence[ChatMessage], placeholders: "_Placeholders") -> tuple[ChatMessage, ...]:
        """The messages with the first character of each literal of a special token hidden: no literal is left."""
        hidden = []
        for message, literals in zip(messages, self._tokenizer.find([m.content for m in messages]), strict=True):
            content, end = [], 0
            for literal in literals:
                swallowed = message.content[literal.start : literal.end]
                first = literal.start + len(swallowed) - len(swallowed.lstrip())
                content += [message.content[end:first], placeholders.hide(message.content[first])]
                end = first + 1
            hidden.append(replace(message, content="".join([*content, message.content[end:]])))
        return tuple(hidden)

    def _hide_edges(self, messages: Sequence[ChatMessage], placeholders: "_Placeholders") -> tuple[ChatMessage, ...]:
        """The messages without any character that begins or ends the literal of a special token."""
        hidden = []
        for message in messages:
            content = message.content
            for edge in self._tokenizer.edges:
                if edge in content:
                    content = content.replace(edge, placeholders.hide(edge))
            hidden.append(replace(message, content=content))
        return tuple(hidden)


class _Placeholders:
    """Hides characters from template and tokenizer behind placeholders that no valid text has: lone surrogates."""

    def __init__(self) -> None:
        self._by_character: dict[str, str] = {}

    def hide(self, character: str) -> str:
        """Its placeholder."""
        return self._by_character.setdefault(character, chr(0xDC00 + len(self._by_character)))

    def restore(self, text: str) -> str:
        """The text with the characters themselves."""
        for character, placeholder in self._by_character.items():
            text = text.replace(placeholder, character)
        return text

    def occur_in(self, text: str) -> bool:
        """Whether a placeholder is in the text."""
        return any(placeholder in text for placeholder in self._by_character.values())

    def mask(self, text: str) -> str:
        """The text, as long as it is, with U+FFFD for the placeholders: valid Unicode."""
        for placeholder in self._by_character.values():
            text = text.replace(placeholder, "\ufffd")
        return text


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise BadRequest("messages must hold at least one message")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise BadRequest(f"messages[{index}].role must be one of {', '.join(ROLES)}, not {message.role!r:.80}")
        _utf8(message.content, f"messages[{index}].content")


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{field} is not valid Unicode: a lone surrogate at character {error.start}") from error
