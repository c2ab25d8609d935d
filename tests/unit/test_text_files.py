"""What a model directory may look like, the dialect of its chat template, and what is refused."""

import json
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from wsbatch.errors import BadRequest
from wsbatch.messages import ChatMessage
from wsbatch.text import ByteText, HuggingFaceText
from wsbatch.text.chat_template import ChatTemplate

TALK = [ChatMessage("system", "Be <brief> & 'kind'."), ChatMessage("user", "hi"), ChatMessage("assistant", "ho")]


def save(directory: Path, **files: object) -> Path:
    """A tokenizer of single words, some special, and other files: text or JSON, by name with __ for the dot."""
    words = ["?", "<s>", "</s>", "<end>", "hi", "ho", "<pad>"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return directory


def test_a_directory_without_a_fast_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing: .* slow one"):
        HuggingFaceText(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json is not JSON"),
        ({"tokenizer__json": {"model": {}}}, r"tokenizer\.json cannot be read"),
        ({"tokenizer_config__json": [1]}, r"tokenizer_config\.json must hold a JSON object, not list"),
        ({"tokenizer_config__json": "[" * 100_000}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config__json": {"added_tokens_decoder": [1]}}, r"_config\.json: added_tokens_decoder must be"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"0": 1}}},
            r"_config\.json: added_tokens_decoder must be",
        ),
        ({"tokenizer_config__json": {"extra_special_tokens": 5}}, r"_config\.json: extra_special_tokens must be"),
        ({"tokenizer_config__json": {"additional_special_tokens": "hi"}}, "additional_special_tokens must be"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "x"}]}}, "chat_template lists what has no name and"),
        ({"tokenizer_config__json": {"chat_template": 5}}, "chat_template must be a text, not 5"),
        ({"generation_config__json": {"eos_token_id": "x"}}, r"n_config\.json: eos_token_id must be an id or a list"),
        ({"chat_template__jinja": "a\n{% if %}"}, "the chat template cannot be read, line 2"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        HuggingFaceText(save(tmp_path, **files))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        HuggingFaceText(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config__json": {"eos_token_id": 5}}, {5}),
        ({"config__json": {"eos_token_id": 5}, "generation_config__json": {"eos_token_id": [2, 3]}}, {2, 3}),
        ({"generation_config__json": {"eos_token_id": 3}, "tokenizer_config__json": {"eos_token": "</s>"}}, {2, 3}),
        ({"special_tokens_map__json": {"eos_token": {"content": "</s>"}}}, {2}),
        ({"tokenizer_config__json": {"eos_token": "<elsewhere>"}}, set()),
        ({"tokenizer_config__json": {"eos_token": None}}, set()),
    ],
)
def test_ends_of_an_output(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    assert HuggingFaceText(save(tmp_path, **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"eos_token": "</s>"}},
        {"special_tokens_map__json": {"eos_token": {"content": "</s>", "lstrip": False}}},
        {"tokenizer_config__json": {"additional_special_tokens": ["</s>"]}},
        {"tokenizer_config__json": {"extra_special_tokens": {"end_of_all": "</s>"}}},
        {"tokenizer_config__json": {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}},
    ],
)
def test_tokens_that_only_a_config_calls_special(tmp_path: Path, files: dict[str, object]) -> None:
    """Neither a user's text becomes one, nor has it text."""
    codec = HuggingFaceText(save(tmp_path, **files, chat_template__jinja="{{ messages[0].content }} </s>"))
    assert 2 not in codec.encode("hi </s> ho")
    assert codec.encode_messages([ChatMessage("user", "hi </s>")]).count(2) == 1
    assert codec.decode([4, 2, 5]) == "hi ho"


def test_an_added_token_that_ends_an_output_is_special(tmp_path: Path) -> None:
    codec = HuggingFaceText(save(tmp_path, generation_config__json={"eos_token_id": 3}))
    assert 3 not in codec.encode("hi <end>")


def test_a_word_that_serves_as_padding_stays_a_word(tmp_path: Path) -> None:
    codec = HuggingFaceText(save(tmp_path, tokenizer_config__json={"pad_token": "hi"}))
    assert codec.encode("hi ho") == [4, 5]
    assert codec.decode([4, 5]) == "hi ho"


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """A tokenizer.json may hold the settings of somebody's training."""
    pipeline = json.loads((save(tmp_path) / "tokenizer.json").read_text())
    pipeline["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    pipeline["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 6,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    assert HuggingFaceText(tmp_path).encode("hi ho hi ho") == [4, 5, 4, 5]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": "hi", "tokenizer_config__json": {"chat_template": "ho"}},
        {"tokenizer_config__json": {"chat_template": "hi"}},
        {
            "tokenizer_config__json": {
                "chat_template": [{"name": "rag", "template": "ho"}, {"name": "default", "template": "hi"}]
            }
        },
    ],
)
def test_where_the_chat_template_is(tmp_path: Path, files: dict[str, object]) -> None:
    assert HuggingFaceText(save(tmp_path, **files)).encode_messages(TALK) == [4]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}", "<s>"),
        ("{{ messages | length }} {{ messages[-1]['content'] }} {{ add_generation_prompt }}", "3 ho True"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be <brief> & \'kind\'."}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=True) }}", '{\n "a": "é",\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "3"),
        ("a{% generation %}{{ messages[2].content }}{% endgeneration %}b", "ahob"),
        ("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
    ],
)
def test_the_dialect_of_chat_templates(source: str, text: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TALK) == text


def test_today_is_the_date_of_this_computer() -> None:
    before = datetime.now().strftime("%d %b %Y")
    rendered = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).render(TALK)
    assert rendered in (before, datetime.now().strftime("%d %b %Y"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(messages[0]) }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.join.__self__.__class__.__mro__ }}",
    ],
)
def test_a_template_reaches_nothing_outside(source: str) -> None:
    with pytest.raises(BadRequest, match="messages: "):
        ChatTemplate(source, {}).render(TALK)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must hold at least one"),
        ([ChatMessage("user", "a"), ChatMessage("wizard", "b")], r"messages\[1\].role must be one of .*, not 'wizard'"),
        ([ChatMessage("user<|end|>", "a")], r"messages\[0\].role"),
        ([ChatMessage("user", "a\ud800")], r"messages\[0\].content is not valid Unicode: .* character 1"),
    ],
)
@pytest.mark.parametrize("simulated", [True, False])
def test_messages_that_are_refused(tmp_path: Path, messages: list[ChatMessage], message: str, simulated: bool) -> None:
    codec = ByteText() if simulated else HuggingFaceText(save(tmp_path, chat_template__jinja=""))
    with pytest.raises(BadRequest, match=message):
        codec.encode_messages(messages)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_prompt_that_is_no_unicode_is_refused(tmp_path: Path, simulated: bool) -> None:
    codec = ByteText() if simulated else HuggingFaceText(save(tmp_path, chat_template__jinja=""))
    with pytest.raises(BadRequest, match="prompt is not valid Unicode"):
        codec.encode("a\udc00")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "messages: this model has no chat template"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "messages: .* does not accept them: no user"),
        ("{{ messages[0].tools.name }}", "messages: .* has no attribute 'tools'"),
        ("{{ messages[0].content + 1 }}", "messages: .* does not accept them"),
    ],
)
def test_a_template_that_says_no(tmp_path: Path, template: str | None, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        HuggingFaceText(save(tmp_path, tokenizer_config__json={"chat_template": template})).encode_messages(TALK[1:])


def test_what_a_template_quotes_can_be_sent(tmp_path: Path) -> None:
    """Stand-ins for hidden characters are no valid Unicode: none may reach the error frame."""
    codec = HuggingFaceText(save(tmp_path, chat_template__jinja="{{ raise_exception(messages[0].content * 1000) }}"))
    with pytest.raises(BadRequest) as refusal:
        codec.encode_messages([ChatMessage("user", "<s>")])
    assert len(refusal.value.message.encode()) < 500
