"""Specs of the command line: `kind:key=value,key=value`, such as `lognormal:median=100,sigma=0.9,max=1000`."""

from collections.abc import Mapping


def parse_spec(
    text: str, kinds: Mapping[str, Mapping[str, float | None]], *, what: str
) -> tuple[str, dict[str, float]]:
    """The kind, and a number for each of its keys.

    Args:
        text: the spec.
        kinds: for each kind its keys with their defaults; None where the key must be given.
        what: what the spec describes, for error messages.

    Raises:
        ValueError: naming the part that is wrong, and what is allowed.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in kinds:
        raise ValueError(f"{what} {text!r}: {kind!r} is none of {', '.join(sorted(kinds))}")
    known = kinds[kind]
    values = {key: default for key, default in known.items() if default is not None}
    for item in filter(None, rest.split(",")):
        key, equals, number = item.partition("=")
        if key not in known:
            raise ValueError(f"{what} {text!r}: {key!r} is none of {', '.join(known) or '(no keys)'}")
        try:
            values[key] = float(number) if equals else float("nan")
        except ValueError:
            values[key] = float("nan")
        if values[key] != values[key]:
            raise ValueError(f"{what} {text!r}: {key} must be a number, got {number!r}")
    missing = [key for key in known if key not in values]
    if missing:
        raise ValueError(f"{what} {text!r}: {missing[0]} is required")
    return kind, values


def check_least(name: str, value: float, least: float, *, above: bool = False) -> None:
    """Raise ValueError, naming the bound, unless `value` is at least `least` (above it with `above`)."""
    if value < least or (above and value == least):
        raise ValueError(f"{name} is {value:g}: must be {'above' if above else 'at least'} {least:g}")
