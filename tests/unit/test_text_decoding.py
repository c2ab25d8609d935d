"""Incremental detokenizing against the library's own decode of the whole, for each way that vocabularies are made."""

from collections.abc import Callable, Sequence
from functools import cache
from os.path import commonprefix
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from wsbatch.text import ByteText, HuggingFaceText

CORPUS = ["hello world, this is text with words", "naïve café 日本語 한국어 🙂👍🏽", "  indented\n\n\tcode <tag> don't"]
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    """As of GPT-2, Llama 3, Qwen; with added tokens that are no bytes of the alphabet."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL))
    tokenizer.add_tokens(["<think>", "é x", "日本", "č"])
    return tokenizer


def byte_level_in_a_sequence() -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As of Llama 2, Mistral, Gemma: bytes only where there is no character, and a leading space that decoding drops.

    The byte tokens must be in the vocabulary, yet not special, or decoding would skip them.
    """
    vocabulary = {token: id_ for id_, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))])}
    for token in ["▁", *"helowrdé�日", "▁h", "▁▁", "ll", "▁w", "\n", "<", "/", "s", ">"]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = [("▁", "h"), ("▁", "▁"), ("l", "l"), ("▁", "w")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """As of XGLM: Unigram."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    train(tokenizer, trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>"))
    return tokenizer


def word_pieces() -> tokenizers.Tokenizer:
    """As of BERT; its decoder also removes spaces before punctuation."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    return tokenizer


def word_endings() -> tokenizers.Tokenizer:
    """As of the first GPT: the end of a word is marked."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    train(tokenizer, trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, end_of_word_suffix="</w>"))
    return tokenizer


def words() -> tokenizers.Tokenizer:
    """Whole words and no decoder."""
    vocabulary = {token: id_ for id_, token in enumerate([*SPECIAL, "hello", "world", ",", "日本語"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    return tokenizer


def train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(CORPUS, trainer)


MAKERS = [
    byte_level,
    byte_level_in_a_sequence,
    byte_fallback,
    metaspace,
    word_pieces,
    word_endings,
    words,
]


any_fixture = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Pair:
    """A codec, and the library's tokenizer from the same file to compare it with."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
        tokenizer.save(str(directory / "tokenizer.json"))
        self.codec = HuggingFaceText(directory)
        self.library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.size = self.library.get_vocab_size()

    def whole(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=True)

    def deltas(self, ids: list[int], prompt_ids: Sequence[int] = ()) -> list[str]:
        detokenizer = self.codec.detokenizer(prompt_ids)
        return [*map(detokenizer.push, ids), detokenizer.flush()]

    def added(self, ids: list[int], prompt_ids: list[int]) -> str:
        """The rule itself: what the library decodes, without the beginning that it shares with the prompt."""
        prompt, whole = self.whole(prompt_ids), self.whole(prompt_ids + ids)
        return whole[len(commonprefix([prompt, whole])) :]  # noqa: RUF071 (these are no paths)

    def ids(self, *tokens: str) -> list[int]:
        return [self.library.get_vocab()[token] for token in tokens]


Make = Callable[[Callable[[], tokenizers.Tokenizer]], Pair]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return cache(lambda maker: Pair(maker(), tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def pair(request: pytest.FixtureRequest, make: Make) -> Pair:
    return make(request.param)


@any_fixture
@given(numbers=st.lists(st.integers(0, 2**16), max_size=24), spread=st.sampled_from([1, 7, 300]))
def test_deltas_are_the_whole_decoded(pair: Pair, numbers: list[int], spread: int) -> None:
    """Any ids at all: halves of characters, special tokens among them, ids beyond the vocabulary."""
    ids = [number // spread % (pair.size + 2) for number in numbers]
    assert "".join(pair.deltas(ids)) == pair.whole(ids)
    assert pair.codec.decode(ids) == pair.whole(ids)


@any_fixture
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" 🙂日한é<s>"), max_size=20))
@example(text="🙂 日本語 한국어 👍🏽")
def test_deltas_of_a_text_are_the_whole_decoded(pair: Pair, text: str) -> None:
    ids = pair.library.encode(text, add_special_tokens=False).ids
    assert "".join(pair.deltas(ids)) == pair.whole(ids)


@any_fixture
@given(
    numbers=st.lists(st.integers(0, 2**16), max_size=24), spread=st.sampled_from([1, 7, 300]), cut=st.integers(0, 24)
)
def test_after_a_prompt_the_text_is_what_the_output_adds_to_it(
    pair: Pair, numbers: list[int], spread: int, cut: int
) -> None:
    """Any ids at all, cut anywhere: within a character, within a run of bytes, behind special tokens."""
    ids = [number // spread % (pair.size + 2) for number in numbers]
    prompt_ids, ids = ids[:cut], ids[cut:]
    assert "".join(pair.deltas(ids, prompt_ids)) == pair.added(ids, prompt_ids)


@any_fixture
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" 🙂日한é<s>"), max_size=20),
    cut=st.integers(0, 24),
)
@example(text="the cat a cat", cut=4)
@example(text="🙂 日本語 한국어 👍🏽", cut=5)
def test_after_a_prompt_the_text_goes_on(pair: Pair, text: str, cut: int) -> None:
    ids = pair.library.encode(text, add_special_tokens=False).ids
    prompt_ids, ids = ids[:cut], ids[cut:]
    assert "".join(pair.deltas(ids, prompt_ids)) == pair.added(ids, prompt_ids)


@pytest.mark.parametrize(
    ("maker", "prompt", "output", "text"),
    [
        (byte_fallback, ["<s>", "▁h", "o"], ["▁w", "o"], " wo"),
        (byte_fallback, ["<s>"], ["▁w", "o"], "wo"),
        (byte_fallback, ["▁h", "</s>"], ["▁w", "o"], " wo"),
        (byte_fallback, ["▁h", "<0xC3>"], ["<0xA9>", "▁h"], "é h"),
        (byte_fallback, ["▁h", "<0xC3>", "<0xA9>"], ["▁h"], " h"),
        (byte_fallback, ["▁h", "<0xC3>", "<0xA9>"], [], ""),
        (metaspace, ["▁", "w"], ["▁", "w"], " w"),
        (word_pieces, ["h"], ["w", "##o", ","], " wo,"),
        (words, ["hello"], ["world", ","], " world ,"),
    ],
)
def test_the_space_before_the_first_token_stays_after_a_prompt(
    make: Make, maker: Callable[[], tokenizers.Tokenizer], prompt: list[str], output: list[str], text: str
) -> None:
    pair = make(maker)
    assert "".join(pair.deltas(pair.ids(*output), pair.ids(*prompt))) == text


@any_fixture
@given(text=st.text(max_size=20))
@example(text="🙂 日本語 한국어 👍🏽 é x done")
def test_byte_level_holds_back_only_the_bytes_of_a_started_character(make: Make, text: str) -> None:
    pair = make(byte_level)
    detokenizer = pair.codec.detokenizer()
    ids = pair.codec.encode(text)
    sent = ""
    for end, id_ in enumerate(ids, 1):
        sent += detokenizer.push(id_)
        if "\ufffd" not in text:
            assert sent == pair.whole(ids[:end]).rstrip("\ufffd")
    assert sent == text


@any_fixture
@given(numbers=st.lists(st.integers(0, 290), max_size=24))
def test_byte_fallback_holds_back_only_a_run_of_bytes(make: Make, numbers: list[int]) -> None:
    pair = make(byte_fallback)
    detokenizer = pair.codec.detokenizer()
    ids = [number % pair.size for number in numbers]
    sent = ""
    for end, id_ in enumerate(ids, 1):
        sent += detokenizer.push(id_)
        visible = [i for i in ids[:end] if i >= len(SPECIAL)]
        if not visible or visible[-1] >= len(SPECIAL) + 256:
            assert sent == pair.whole(ids[:end])


def test_an_invalid_byte_spoils_the_run_it_is_in(make: Make) -> None:
    """As in the library: had the é been sent at once, it would have had to be taken back."""
    pair = make(byte_fallback)
    ids = pair.ids("▁h", "<0xC3>", "<0xA9>", "<0xFF>", "o", "<0xC3>", "</s>", "<0xA9>", "▁h")
    assert pair.deltas(ids) == ["h", "", "", "", "\ufffd\ufffd\ufffdo", "", "", "", "é h", ""]


def test_special_tokens_and_unknown_ids_have_no_text(pair: Pair) -> None:
    assert pair.deltas([*pair.ids("<s>", "</s>"), pair.size + 7]) == ["", "", "", ""]


@pytest.mark.parametrize(
    ("text", "deltas"),
    [("hé", ["h", "", "é", ""]), ("🙂", ["", "", "", "🙂", ""]), ("\x7f한", ["\x7f", "", "", "한", ""])],
)
def test_bytes_of_the_simulated_model(text: str, deltas: list[str]) -> None:
    codec = ByteText()
    ids = codec.encode(text)
    assert codec.decode([*ids, 256]) == text
    detokenizer = codec.detokenizer()
    assert [*map(detokenizer.push, ids), detokenizer.flush()] == deltas
    assert detokenizer.push(256) == ""


def test_bytes_of_the_simulated_model_after_a_prompt() -> None:
    detokenizer = ByteText().detokenizer([*"é".encode(), 256, 0xE2, 0x82])
    assert [*map(detokenizer.push, b"\xacx"), detokenizer.flush()] == ["€", "x", ""]
