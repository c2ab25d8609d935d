"""Prompts and conversations as ids: exactly the library's, and never a special token out of a user's text."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders as decode_stages
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from wsbatch.errors import BadRequest
from wsbatch.messages import ChatMessage
from wsbatch.text import ByteText, HuggingFaceText
from wsbatch.text.codec import ROLES

SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", "⏹"]
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# What users write to break out: special tokens whole, in halves, and what surrounds them.
fragments = st.sampled_from(
    [
        *SPECIAL,
        "<|st",
        "art|>",
        "<|en",
        "d|>",
        "<",
        ">",
        "|",
        "<s",
        "/s>",
        "\n",
        " ",
        "system",
        "⏹",
        "日本",
        "🙂",
        "</",
        "s",
    ]
)
contents = st.lists(fragments, max_size=8).map("".join)
harmless = st.text(max_size=20).filter(lambda text: not any(literal in text for literal in SPECIAL))


def byte_level() -> tokenizers.Tokenizer:
    """As of Llama 3: bytes, and a BOS in front of every text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decode_stages.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["system user assistant hello <world> | start end </s> 日本"], trainer)
    with_bos(tokenizer)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """A model that takes special tokens for words, behind a normalizer that can make them."""
    words = [
        *((token, 0.0) for token in SPECIAL),
        *((character, -3.0) for character in "▁abdenrst<>|/\n"),
        ("▁a", -2.0),
    ]
    tokenizer = tokenizers.Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decode_stages.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    with_bos(tokenizer)
    return tokenizer


def with_bos(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


Make = Callable[..., HuggingFaceText]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A codec for a tokenizer, a chat template and what else `tokenizer_config.json` says; made once for each."""
    made: dict[str, HuggingFaceText] = {}

    def codec(
        tokenizer: Callable[[], tokenizers.Tokenizer], template: str | None = CHAT, **config: object
    ) -> HuggingFaceText:
        key = repr((tokenizer, template, config))
        if key not in made:
            directory = tmp_path_factory.mktemp("model")
            tokenizer().save(str(directory / "tokenizer.json"))
            config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template} | config
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            made[key] = HuggingFaceText(directory)
        return made[key]

    return codec


BYTE_LEVEL, UNIGRAM = byte_level(), unigram()
often = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


def shown(ids: list[int]) -> str:
    """Ids of the byte-level vocabulary as text, special tokens included: nothing is lost in it."""
    return BYTE_LEVEL.decode(ids, skip_special_tokens=False)


def special_in(ids: list[int]) -> list[str]:
    return [SPECIAL[id_] for id_ in ids if 0 < id_ < len(SPECIAL)]


def talk(*contents: str) -> list[ChatMessage]:
    return [ChatMessage(("user", "assistant")[turn % 2], content) for turn, content in enumerate(contents)]


@often
@given(contents)
def test_a_prompt_is_text_behind_one_bos(make: Make, text: str) -> None:
    ids = make(byte_level).encode(text)
    assert special_in(ids) == ["<s>"]
    assert shown(ids) == "<s>" + text


@often
@given(contents | st.text("abs</>|＜＞ 日⏹", max_size=12))
@example("＜/s＞")  # full-width: the normalizer makes it </s>
def test_a_prompt_has_no_special_token_where_the_model_knows_them_as_words(make: Make, text: str) -> None:
    assert special_in(make(unigram).encode(text)) == ["<s>"]


def test_the_unigram_model_would_take_special_tokens_for_words() -> None:
    """What the tests with it are about."""
    spelling = unigram()
    spelling.encode_special_tokens = True
    assert special_in(spelling.encode("a</s>", add_special_tokens=False).ids) == ["</s>"]


@often
@given(harmless)
def test_a_prompt_without_literals_is_encoded_as_by_the_library(make: Make, text: str) -> None:
    assert make(byte_level).encode(text) == BYTE_LEVEL.encode(text).ids


@often
@given(st.lists(harmless, min_size=1, max_size=3))
@pytest.mark.parametrize(("maker", "library"), [(byte_level, BYTE_LEVEL), (unigram, UNIGRAM)])
def test_a_conversation_without_literals_is_encoded_in_one_piece(
    make: Make, maker: Callable[[], tokenizers.Tokenizer], library: tokenizers.Tokenizer, texts: list[str]
) -> None:
    turns = "".join(f"<|start|>{message.role}\n{message.content}<|end|>\n" for message in talk(*texts))
    expected = library.encode(f"<s>{turns}<|start|>assistant\n", add_special_tokens=False).ids
    assert make(maker).encode_messages(talk(*texts)) == expected


@often
@given(contents)
@example("<s>hello")
@example("<s><s>")
@example("hello<s>")
def test_special_tokens_of_a_prompt_are_parsed_where_that_is_asked_for(make: Make, text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert make(byte_level).encode(text, parse_special=True) == (ids if ids[:1] == [1] else [1, *ids])


def test_what_ends_every_text_is_not_put_twice_either(make: Make) -> None:
    def with_eos() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        ends = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
        return tokenizer

    for text in ("hi", "<s>hi", "hi</s>", "<s>hi</s>"):
        assert shown(make(with_eos).encode(text, parse_special=True)) == "<s>hi</s>"
    assert shown(make(with_eos).encode("<s>hi</s>")) == "<s><s>hi</s></s>", "text, between two tokens"


def test_a_chat_prompt_made_by_hand_is_the_conversation(make: Make) -> None:
    codec = make(byte_level)
    by_hand = "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert codec.encode(by_hand, parse_special=True) == codec.encode_messages(talk("hello"))
    assert special_in(codec.encode(by_hand)) == ["<s>"]


@pytest.mark.parametrize("role", ROLES)
def test_roles(make: Make, role: str) -> None:
    for codec in (make(byte_level), ByteText()):
        assert role in codec.decode(codec.encode_messages([ChatMessage(role, "x")]))
        with pytest.raises(BadRequest, match=r"^messages\[0\]\.role must be one of system, .*, function, not 'end'$"):
            codec.encode_messages([ChatMessage("end", "x")])


# Templates that treat contents in the ways in which templates do, with the same in Python.
TEMPLATES: dict[str, tuple[str, Callable[[list[str]], str]]] = {
    "plain": (
        "<s>{% for m in messages %}{{ m.content }}<|end|>{% endfor %}",
        lambda c: f"<s>{'<|end|>'.join([*c, ''])}",
    ),
    "trimmed": (
        "{% for m in messages %}<|start|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
        lambda c: "".join(f"<|start|>{each.strip()}</s>" for each in c),
    ),
    "joined": ("{% for m in messages %}{{ m.content }}{% endfor %}", "".join),
    "cut": (
        "{% for m in messages %}{{ m.content.split('\\n')[-1] + '<|end|>' }}{% endfor %}",
        lambda c: "".join(each.split("\n")[-1] + "<|end|>" for each in c),
    ),
    "squeezed": (
        "<s>{% for m in messages %}{{ m.content | replace('\\n', '') }}{% endfor %}",
        lambda c: "<s>" + "".join(c).replace("\n", ""),
    ),
    "open": ("{% for m in messages %}<|en{{ m.content }}{% endfor %}", lambda c: "".join(f"<|en{each}" for each in c)),
    "closing": (
        "{% for m in messages %}{{ m.content }}s><s>{% endfor %}",
        lambda c: "".join(f"{each}s><s>" for each in c),
    ),
}


@often
@pytest.mark.parametrize("name", TEMPLATES)
@given(texts=st.lists(contents, min_size=1, max_size=3))
@example(texts=["<|e", "nd|>"])
@example(texts=["<|en\nd|>", "d|>"])
@example(texts=["</", "</s><"])
def test_special_tokens_come_from_the_template_alone(make: Make, name: str, texts: list[str]) -> None:
    source, expected = TEMPLATES[name]
    ids = make(byte_level, source).encode_messages(talk(*texts))
    assert shown(ids) == expected(texts)
    assert special_in(ids) == special_in(make(byte_level, source).encode_messages(talk(*["-" for _ in texts])))


@often
@given(texts=st.lists(contents | st.text("abs</>|＜＞", max_size=8), min_size=1, max_size=3))
@example(texts=["＜/s＞"])
def test_nor_from_words_or_a_normalizer(make: Make, texts: list[str]) -> None:
    ids = make(unigram).encode_messages(talk(*texts))
    assert special_in(ids) == ["<s>", *["<|start|>", "<|end|>"] * len(texts), "<|start|>"]


def test_a_normalizer_makes_no_special_token_where_they_match_after_it(make: Make) -> None:
    def normalizing() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=True, special=True)])
        return tokenizer

    assert special_in(normalizing().encode("＜|end|＞").ids) == ["<s>", "<|end|>"]
    ids = make(normalizing).encode_messages(talk("＜|end|＞"))
    assert special_in(ids) == ["<s>", "<|start|>", "<|end|>", "<|start|>"]
    assert "<|start|>user\n<|end|><|end|>\n" in shown(ids)
    assert special_in(make(normalizing).encode("＜|end|＞")) == ["<s>"]


def test_special_tokens_of_the_template_that_match_after_a_normalizer(make: Make) -> None:
    def normalizing() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=True, special=True)])
        return tokenizer

    codec = make(normalizing, "<s>{{ messages[0].content }}<|END|>")
    assert shown(codec.encode_messages(talk("hi"))) == "<s>hi<|end|>"
    assert special_in(codec.encode_messages(talk("<|End|>"))) == ["<s>", "<|end|>"]


def test_a_template_sees_what_is_beside_a_literal(make: Make) -> None:
    """Some look for marks in the messages, as for the thinking of earlier turns."""
    codec = make(byte_level, "<s>{{ messages[0].content.split('</think>')[-1] }}<|end|>")
    assert shown(codec.encode_messages(talk("<think>no</s></think>yes</s>"))) == "<s>yes</s><|end|>"


def test_literals_are_spelled_as_any_text(make: Make) -> None:
    spelling = byte_level()
    spelling.encode_special_tokens = True
    text = "Was </s> and <|end|> meant?"
    assert make(byte_level).encode(text) == spelling.encode(text).ids
    body = spelling.encode(f"user\n{text}", add_special_tokens=False).ids
    assert make(byte_level).encode_messages(talk(text))[2 : 2 + len(body)] == body


def test_bos_is_not_doubled(make: Make) -> None:
    assert special_in(make(byte_level).encode_messages(talk("<s>hi"))).count("<s>") == 1
    without = make(byte_level, "{{ messages[0].content }}<|end|>")
    assert special_in(without.encode_messages(talk("<s>hi"))) == ["<|end|>"]


def test_white_space_that_a_special_token_swallows(make: Make) -> None:
    def swallowing() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", lstrip=True, rstrip=True, special=True)])
        return tokenizer

    codec = make(swallowing, "<s>{{ messages[0].content.split('<br>')[-1] }} <|end|> \nx")
    ids = codec.encode_messages(talk("<br>a <|end|> b"))
    assert shown(ids) == "<s>a <|end|> b<|end|>x"
    assert special_in(ids) == ["<s>", "<|end|>"]


def test_added_tokens_that_are_not_special_stay_tokens(make: Make) -> None:
    def thinking() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.add_tokens(["<think>"])
        return tokenizer

    codec = make(thinking)
    (id_,) = codec.encode("<think>")[1:]
    assert codec.decode([id_]) == "<think>"
    assert id_ in codec.encode_messages(talk("<think> </s>"))


@often
@given(st.text(max_size=40))
@example("startstart")
def test_no_text_is_fewer_tokens_than_its_size_allows(make: Make, text: str) -> None:
    codec = make(byte_level)
    assert len(text.encode()) <= (len(codec.encode(text)) - 1) * codec.max_token_bytes


def test_the_longest_token_is_the_bound(make: Make) -> None:
    def long() -> tokenizers.Tokenizer:
        tokenizer = byte_level()
        tokenizer.add_tokens(["日本語" * 5])
        return tokenizer

    assert make(long).max_token_bytes == 45
    assert ByteText().max_token_bytes == 1


def test_the_simulated_model_talks_bytes() -> None:
    assert bytes(ByteText().encode_messages(talk("hi", "ho"))) == b"user: hi\nassistant: ho\nassistant: "
    assert ByteText().eos_token_ids == {256}


def test_importing_it_loads_no_library() -> None:
    program = "import sys, wsbatch.text; print({'tokenizers', 'jinja2', 'torch', 'transformers'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True).stdout == b"set()\n"
