"""What a setting is: a dataclass field with its help text and bounds, checked when the object is made."""

import math
from dataclasses import Field, field, fields
from typing import Any, cast


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    several: bool = False,
) -> Any:
    """A dataclass field with its description and inclusive bounds. A None default means the field may be None.

    `secret` keeps it out of what is printed; `several` is of text that is a list: parts separated by commas.
    """
    metadata = {"help": help, "least": least, "most": most, "choices": choices, "several": several}
    return field(default=default, metadata=metadata, kw_only=True, repr=not secret)


class Settings:
    """Base of the configuration classes: checks every field when the object is made."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the first field that is out of its bounds."""
        for spec in fields(cast(Any, self)):
            value = getattr(self, spec.name)
            try:
                _check(value, spec)
            except _Bad as bad:
                raise ValueError(f"{type(self).__name__}.{spec.name} {bad}") from None


class _Bad(Exception):
    """What is wrong with a value."""


def _check(value: Any, spec: Field[Any]) -> None:
    """Raise _Bad unless the field may have this value."""
    if value is None:
        if spec.default is not None:
            raise _Bad("must not be None")
        return
    if isinstance(spec.default, tuple) and not isinstance(value, tuple):
        raise _Bad(f"is {value!r}: must be a tuple")
    entries = value if isinstance(value, tuple) else (value,)
    texts = value.split(",") if spec.metadata["several"] else entries
    if any(isinstance(text, str) and not text.strip() for text in texts):
        raise _Bad("is empty, or has an empty part: give it a value, or leave it out")
    if (choices := spec.metadata["choices"]) is not None and value not in choices:
        raise _Bad(f"is {value!r}: must be one of {', '.join(choices)}")
    if spec.metadata["least"] is not None or spec.metadata["most"] is not None:
        for number in entries:
            _check_number(number, value, spec)


def _check_number(number: Any, value: Any, spec: Field[Any]) -> None:
    """Raise _Bad unless a number, perhaps one of several in the value, is of the field's kind and in its bounds."""
    least, most = spec.metadata["least"], spec.metadata["most"]
    if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
        raise _Bad(f"is {value!r}: must be a number")
    if isinstance(spec.default, int) and not isinstance(number, int):
        raise _Bad(f"is {value!r}: must be a whole number")
    if least is not None and number < least:
        raise _Bad(f"is {value!r}: must be at least {least}")
    if most is not None and number > most:
        raise _Bad(f"is {value!r}: must be at most {most}")
