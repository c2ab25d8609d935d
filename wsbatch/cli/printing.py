"""What a stream can hold, and what a terminal may be shown."""

import re
import sys

# All controls but tab and newline: what a server sends must not operate its reader's terminal.
_CONTROLS = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)], "\ufffd")
_NOT_ASCII = re.compile(r"[^\x00-\x7e]")


def without_controls(text: str) -> str:
    """The text as a terminal may be shown it: tabs and newlines are the only control characters left."""
    return text.translate(_CONTROLS)


def printable(text: str) -> str:
    """The text for stdout: without control characters where that is a terminal, else untouched."""
    return without_controls(text) if sys.stdout.isatty() else text


def printable_json(text: str, encoding: str) -> str:
    """JSON for stdout: what the encoding lacks, and what operates a terminal, is written as `\\uXXXX`."""

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        if not (terminal and ord(character) in _CONTROLS) and _holds(encoding, character):
            return character
        units = character.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

    terminal = sys.stdout.isatty()
    return text if not terminal and _holds(encoding, text) else _NOT_ASCII.sub(escaped, text)


def _holds(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
