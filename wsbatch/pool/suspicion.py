"""Is a request the cause of what befalls the replicas it is sent to? It is retried, but not for ever."""

from collections import Counter
from typing import Literal, TypeAlias

from wsbatch.pool.replica import Blame, Replica

# What befell a request on a replica. killed: the replica was lost while it ran there. lost: the replica was lost while
# no start of it was known there: the word of a start can be lost in the very crash that it causes, but most of those
# only stood in the queue. cut: the connection alone was lost. failed: the replica said an error, broke the protocol, or
# said nothing for too long. moved: the replica ended it of its own accord, as one does that shuts down, or another
# request is the likelier cause.
Mishap: TypeAlias = Literal["killed", "lost", "cut", "failed", "moved"]

# So many of a kind in a row, and the request is taken for the cause.
MISHAPS: dict[Mishap, int] = {"killed": 2, "lost": 3, "cut": 3, "failed": 3, "moved": 8}
# In a row: with fewer tokens of output than this between two of them. A request that only shared a replica with the
# cause has long gone past the place.
INNOCENT_TOKENS = 8


class Suspicion:
    """The mishaps of one request, in a row, and the replicas to blame if it is not the request."""

    def __init__(self) -> None:
        self._row: Counter[Mishap] = Counter()
        self._tokens = 0
        self._blames: list[Blame] = []

    @property
    def faults(self) -> int:
        """Mishaps in a row that it may be the cause of."""
        return self._row.total() - self._row["moved"]

    def cleared(self, by: Replica) -> None:
        """That replica has done it, or a good part of it: so those before it are to blame."""
        for blame in self._blames:
            blame.confirm(by)
        self._blames.clear()

    def note(self, mishap: Mishap, blame: Blame | None, *, tokens: int) -> bool:
        """This befell it after so many tokens of output. Whether it is the suspect now."""
        if blame is not None:
            self._blames.append(blame)
        if tokens >= self._tokens + INNOCENT_TOKENS:
            self._row.clear()
        self._tokens = tokens
        self._row[mishap] += 1
        return self._row[mishap] >= MISHAPS[mishap]
