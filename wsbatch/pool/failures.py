"""One request's failures on replicas: it is retried, until so many in a row say that it causes them itself."""

from collections import Counter
from typing import Literal, TypeAlias

from wsbatch.pool.replica import Blame, Replica

# How a request failed on a replica. killed: the replica was lost while it ran there. lost: the replica was lost while
# no start of it was known there: the word of a start can be lost in the very crash that it causes, but most of those
# only stood in the queue. cut: the connection alone was lost. failed: the replica said an error, broke the protocol, or
# said nothing for too long. moved: the replica ended it of its own accord, as one does that shuts down, or another
# request is the likelier cause.
FailureKind: TypeAlias = Literal["killed", "lost", "cut", "failed", "moved"]

# So many of a kind in a row, and the request is taken for the cause.
MAX_IN_A_ROW: dict[FailureKind, int] = {"killed": 2, "lost": 3, "cut": 3, "failed": 3, "moved": 8}
# In a row: with fewer tokens of output than this between two of them. A request that only shared a replica with the
# cause has long gone past the place.
INNOCENT_TOKENS = 8


class FailureHistory:
    """The failures of one request, in a row, and the replicas to blame if it is not the request."""

    def __init__(self) -> None:
        self._row: Counter[FailureKind] = Counter()
        self._tokens = 0
        self._blames: list[Blame] = []

    @property
    def count(self) -> int:
        """Failures in a row that it may be the cause of."""
        return self._row.total() - self._row["moved"]

    def succeeded(self, by: Replica) -> None:
        """That replica has done it, or a good part of it: so those before it are to blame."""
        for blame in self._blames:
            blame.confirm(by)
        self._blames.clear()

    def record(self, kind: FailureKind, blame: Blame | None, *, tokens: int) -> bool:
        """It failed after so many tokens of output. Returns whether it is taken for the cause now."""
        if blame is not None:
            self._blames.append(blame)
        if tokens >= self._tokens + INNOCENT_TOKENS:
            self._row.clear()
        self._tokens = tokens
        self._row[kind] += 1
        return self._row[kind] >= MAX_IN_A_ROW[kind]
