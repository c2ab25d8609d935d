"""The chat template that comes with a model: a conversation as the one text that its model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wsbatch.errors import BadRequest
from wsbatch.messages import ChatMessage


class ChatTemplate:
    """A Jinja template in the dialect of transformers' `apply_chat_template`, sandboxed.

    Args:
        source: the template's text.
        names: what it may refer to besides the messages, such as `bos_token`.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template cannot be read, line {error.lineno}: {error.message}") from error
        self._names = dict(names)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the assistant's next turn begins.

        Raises:
            BadRequest: the template does not accept this conversation.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                self._names, messages=turns, tools=None, documents=None, add_generation_prompt=True
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template says no by raise_exception, or by stumbling over what it does not expect. What it says may
            # quote the messages at length, and hold what is no valid Unicode.
            reason = str(error).encode("utf-8", "replace").decode()
            raise BadRequest(f"messages: the model's chat template does not accept them: {reason:.300}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks the assistant's words for training; here they are just text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration is not a ClassVar)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
