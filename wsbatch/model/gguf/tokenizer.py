"""The tokenizer in a GGUF file, read by transformers, and what transformers leaves out of it."""

from pathlib import Path
from typing import Any

from wsbatch.model.gguf.file import GgufFile

# How text is split before merging (`tokenizer.ggml.pre`), by what llama.cpp does for each name (`llama-vocab.cpp`):
# as transformers' reader knows to,
_SPLITS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"),
    *("tekken", "qwen2", "deepseek-r1-qwen", "kormo", "megrez", "qwen35", "gpt-4o", "llama4", "kanana2"),
}
# as GPT-2 does (which is what old files without a name are taken for),
_GPT2_SPLIT = {
    *("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "mellum"),
}
# and as GPT-2 does after cutting numbers into digits.
_DIGITS_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}

# For these, a word that is a token is that token, whatever the merges would make of it.
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "tekken"}

# Ids of tokens that mark something in a prompt, or that only other kinds of model use; old files' notes; and what
# transformers' reader makes use of.
_IGNORED = [
    *(f"tokenizer.ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("prefix", "suffix", "middle", "fsep")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("cls", "mask", "seperator", "separator", "unknown", "padding")),
    *("tokenizer.ggml.added_tokens", "tokenizer.ggml.token_type_count", "tokenizer.chat_templates"),
    *("tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.ggml.bos_token_id"),
    *("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.chat_template"),
]


def read_tokenizer(file: GgufFile, path: Path) -> Any:
    """transformers' tokenizer for a GGUF file; every key that begins with `tokenizer.` is thereby accounted for.

    Args:
        file: the model.
        path: its first part, which holds the metadata.

    Raises:
        ValueError: the file has no tokenizer, or one of a kind that is not supported.
    """
    # Here, because importing transformers takes seconds, and a file may be refused before.
    import transformers

    kind = file.take("tokenizer.ggml.model", "none")
    split = file.take("tokenizer.ggml.pre", "default")
    prefix = file.take("tokenizer.ggml.add_space_prefix", kind == "llama")
    file.ignore(_IGNORED + file.keys("tokenizer.chat_template."))
    file.expect("tokenizer.ggml.add_sep_token", False)
    file.expect("tokenizer.ggml.remove_extra_whitespaces", False)
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model = {kind} is not supported (only gpt2 or llama)")
    # Not by from_pretrained, which would mix in, or even prefer, what other files lie beside this one.
    made: Any = transformers.PreTrainedTokenizerFast
    tokenizer = made(gguf_file=path.name, name_or_path=str(path.parent), vocab_file=str(path))
    if kind == "gpt2":
        _split(tokenizer.backend_tokenizer, split)
    else:
        _prefix_space(tokenizer.backend_tokenizer, wanted=prefix)
    return tokenizer


def end_token_ids(file: GgufFile) -> list[int]:
    """Every id that ends an output: of the text, of a turn, of a message."""
    ids = [file.take(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _split(backend: Any, name: str) -> None:
    """Split text as a byte-level vocabulary of this name was made for."""
    from tokenizers import pre_tokenizers

    if name not in _SPLITS | _GPT2_SPLIT | _DIGITS_SPLIT:
        raise ValueError(f"tokenizer.ggml.pre = {name} is not supported")
    if name in _SPLITS and "Split" not in str(backend.pre_tokenizer):
        raise ValueError(f"tokenizer.ggml.pre = {name} needs a newer release of transformers")
    if name in _DIGITS_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    backend.model.ignore_merges = name in _WHOLE_WORDS


def _prefix_space(backend: Any, *, wanted: bool) -> None:
    """Put a space before every text, or not, in a SentencePiece vocabulary."""
    from tokenizers import decoders, pre_tokenizers

    text = backend.normalizer.normalize_str("a") if backend.normalizer else "a"
    pieces = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, (0, 1))]
    if pieces[0][0].startswith("▁") == wanted:
        return
    if wanted or not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        raise ValueError(f"tokenizer.ggml.add_space_prefix = {wanted} is not supported for this tokenizer")
    backend.pre_tokenizer.prepend_scheme = "never"
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
