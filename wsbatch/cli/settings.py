"""Flags made from a configuration class: `max_batch_size` is `--max-batch-size`, with its help, bounds and default."""

import argparse
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wsbatch.cli.parsing import text
from wsbatch.config import Settings

_Config = TypeVar("_Config", bound=Settings)

# Of a router's ServerConfig: its replicas have merged what comes in quick succession, and to hold that back once more
# would only cost time.
ROUTER_DEFAULTS = {"frame_interval_ms": 0.0}


def add_settings(parser: argparse.ArgumentParser, config: type[Settings], *, title: str, **defaults: Any) -> None:
    """Add a flag for each field of `config`. Flags that are not given leave no attribute behind: `defaults`, for the
    help alone, are what `read_settings` is given too."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for spec in fields(config):  # type: ignore[arg-type]  # Settings itself is no dataclass, its subclasses are
        options: dict[str, Any] = {"dest": spec.name, "default": argparse.SUPPRESS, "help": _help(spec, defaults)}
        kind = _without_none(hints[spec.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif spec.metadata["choices"] is not None:
            options["choices"] = spec.metadata["choices"]
        else:
            options["type"], options["metavar"] = _reader(kind)
            if get_origin(kind) is tuple or spec.metadata["several"]:
                options["action"] = _Gather
        group.add_argument(_flag(spec.name), **options)


def read_settings(arguments: argparse.Namespace, config: type[_Config], **defaults: Any) -> _Config:
    """The configuration that the flags ask for; `defaults` stand in for flags that were not given.

    Raises ValueError naming the flag, its value and its bound.
    """
    names = [spec.name for spec in fields(config)]  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        return config(**{**defaults, **given})
    except ValueError as error:
        raise ValueError(in_flags(error)) from error


def in_flags(error: object) -> str:
    """The error's message with `EngineConfig.max_batch_size` as the flag that sets it."""
    return re.sub(r"\b(?:Engine|Server|Pool|Fleet)Config\.(\w+)", lambda found: _flag(found[1]), str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(spec: Field[Any], defaults: Mapping[str, Any]) -> str:
    notes = []
    default = defaults.get(spec.name, spec.default)
    least, most = spec.metadata["least"], spec.metadata["most"]
    if most is not None:
        notes.append(f"{_number(least)} to {_number(most)}")
    elif least is not None:
        notes.append(f"at least {_number(least)}")
    if default is not None and default != ():  # the text itself says what those mean
        notes.append(f"default: {_shown(default)}")
    described: str = spec.metadata["help"] + (f" ({'; '.join(notes)})" if notes else "")
    return described.replace("%", "%%")


def _number(value: float) -> str:
    return f"{value:.12g}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return _number(value) if isinstance(value, int | float) else str(value)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    return str if get_origin(kind) is Literal else kind


def _reader(kind: Any) -> tuple[Callable[[str], Any], str]:
    """How a flag's text becomes a value of this type, and what stands for it in the help."""
    if get_origin(kind) is tuple:
        item, metavar = _reader(get_args(kind)[0])

        def read(value: str) -> tuple[Any, ...]:
            parts = [part.strip() for part in value.split(",")]
            if not all(parts):
                raise argparse.ArgumentTypeError("must not be empty, nor have an empty part")
            return tuple(item(part) for part in parts)

        return read, f"{metavar},…"
    if kind is int:
        return whole_number, "N"
    if kind is float:
        return number, "X"
    return text, "TEXT"


class _Gather(argparse.Action):
    """A list that is given in several flags is one list."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before is not None:
            values = f"{before},{values}" if isinstance(values, str) else before + values
        setattr(namespace, self.dest, values)


def whole_number(value: str) -> int:
    """An argparse type: an int, or an error in words."""
    try:
        return int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number") from None


def count(value: str) -> int:
    """An argparse type: an int of at least 1."""
    found = whole_number(value)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{found} is too low: must be at least 1")
    return found


def number(value: str) -> float:
    """An argparse type: a float, or an error in words."""
    try:
        return float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None
