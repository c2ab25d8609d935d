"""Names in messages."""

from collections.abc import Sequence


def listed(names: Sequence[str], *, shown: int = 5) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
