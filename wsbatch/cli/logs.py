"""The log on stderr: from which severity on, and what stands in a line."""

import argparse
import logging
from typing import Any

_MOST_CHARS = 2000
# Texts in it come from clients and replicas: none of them may begin a line, or operate the terminal of who reads it.
_ESCAPES = {number: f"\\x{number:02x}" for number in [*range(0x20), *range(0x7F, 0xA0)]}
_ESCAPES_IN_TRACEBACKS = {number: text for number, text in _ESCAPES.items() if chr(number) not in "\t\n"}


class LineFormatter(logging.Formatter):
    """One line a record, of bounded length, with control characters escaped; a traceback follows on its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in the library
        """See `logging.Formatter`."""
        line = super().formatMessage(record)
        if len(line) > _MOST_CHARS:
            line = f"{line[:_MOST_CHARS]}… ({len(line)} characters)"
        return line.translate(_ESCAPES)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - its name in the library
        """See `logging.Formatter`."""
        return super().formatException(ei).translate(_ESCAPES_IN_TRACEBACKS)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the flag for `set_up_logging`."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severity logged to stderr (default: info)",
    )


def set_up_logging(level: str) -> None:
    """Log to stderr: this package from `level` on, what it stands on from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("wsbatch").setLevel(level.upper())
