"""What a model directory says about its text: which files, which names, which special tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The text side of a Hugging Face model directory.

    Attributes:
        path: of `tokenizer.json`.
        pipeline: its content.
        names: the special tokens that have a name, `bos_token` and the like, as a chat template may use them.
        special: the literals of all tokens that these files call special, named or not.
        eos_token_ids: as the generation config (or else the model's config) gives them; may be empty.
        template: the source of the chat template; None where there is none.
    """

    path: Path
    pipeline: dict[str, Any]
    names: dict[str, str]
    special: frozenset[str]
    eos_token_ids: frozenset[int]
    template: str | None

    @classmethod
    def read(cls, directory: Path) -> "TokenizerFiles":
        """Read them. Every file but `tokenizer.json` may be missing.

        Raises:
            FileNotFoundError: there is no `tokenizer.json`.
            ValueError: a file is not what it should be.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the text of a model needs its fast tokenizer; a model that ships only a "
                "slow one (tokenizer.model, vocab.txt) has to be saved once with transformers' AutoTokenizer"
            )
        config = read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")
        return cls(
            path=path,
            pipeline=read_json(path),
            names={name: literal for name in config if name.endswith("_token") and (literal := _literal(config[name]))},
            special=frozenset(_special(config, directory / "tokenizer_config.json")),
            eos_token_ids=_eos_token_ids(directory),
            template=_template(config, directory),
        )

    def added_ids(self, literal: str | None) -> frozenset[int]:
        """The ids of the added tokens of this text."""
        tokens = self.pipeline.get("added_tokens")
        entries = [entry for entry in tokens if isinstance(entry, dict)] if isinstance(tokens, list) else []
        return frozenset(
            entry["id"] for entry in entries if entry.get("content") == literal and isinstance(entry.get("id"), int)
        )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file. Raises ValueError, which names the file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _literal(token: object) -> str | None:
    """A token is written as its text, or as a map with its text and its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special(config: dict[str, Any], path: Path) -> Iterator[str]:
    for name, value in config.items():
        if name == "pad_token":  # may be any word that is at hand; if it is a special token, another place says so
            continue
        if name.endswith("_token"):
            tokens = [value]
        elif name in ("additional_special_tokens", "extra_special_tokens"):
            tokens = list(value.values()) if isinstance(value, dict) else value or []
            if not isinstance(tokens, list):
                raise ValueError(f"{path}: {name} must be a list or an object of tokens, not {value!r:.80}")
        elif name == "added_tokens_decoder":
            if not isinstance(value, dict) or not all(isinstance(token, dict) for token in value.values()):
                raise ValueError(f"{path}: {name} must be an object of objects, not {value!r:.80}")
            tokens = [token for token in value.values() if token.get("special")]
        else:
            continue
        yield from filter(None, map(_literal, tokens))


def _eos_token_ids(directory: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json(directory / name).get("eos_token_id")
        if ids is not None:
            return token_ids(ids, directory / name)
    return frozenset()


def token_ids(value: object, path: Path) -> frozenset[int]:
    """`eos_token_id` of a config: one id, several, or none. Raises ValueError, which names the file or directory."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in ids):
        raise ValueError(f"{path}: eos_token_id must be an id or a list of ids, not {value!r:.80}")
    return frozenset(ids)


def _template(config: dict[str, Any], directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error
    source = config.get("chat_template")
    try:
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}: chat_template lists what has no name and template") from error
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{directory}: chat_template must be a text, not {source!r:.80}")
    return source
