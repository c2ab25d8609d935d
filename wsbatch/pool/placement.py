"""Which replica a request goes to: the one with the least work, unless another has computed its prompt's beginning."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import trio

from wsbatch.config import PoolConfig
from wsbatch.pool.prefixes import PrefixTable
from wsbatch.pool.replica import Replica
from wsbatch.pool.search import Search

_Place = TypeVar("_Place")


class Placement:
    """Remembers who computed which beginning of a prompt."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._prefixes: PrefixTable[Replica] = PrefixTable()

    def place(self, search: Search, ready: Sequence[Replica]) -> Replica | None:
        """The replica for a request, of those that are ready: one whose limits take it, that is not full, not ejected,
        and has not been tried. None where there is none."""
        now_s = trio.current_time()
        able = _of_kind(search, ready)
        # Where nobody's limits take it, the largest says so in its own words.
        able = [replica for replica in able if _fits(search, replica)] or _largest(able)
        free = [replica for replica in able if replica not in search.tried and replica.retry_after_ms is None]
        # Where all are ejected, they are better than none.
        free = [replica for replica in free if replica.health.admits(now_s)] or free
        if not free:
            return None
        work = {replica: replica.work_tokens for replica in free}
        chosen = choose(work, self._prefixes.holder(search.hashes), slack_tokens=self._config.affinity_tokens)
        self._prefixes.remember(search.hashes, chosen)
        chosen.health.sent(now_s, trial_s=self._config.accept_timeout_s)
        return chosen

    def fits_elsewhere(self, search: Search, ready: Sequence[Replica]) -> bool:
        """Whether the limits of one that has not been tried take it, be it full or not."""
        return any(_fits(search, replica) for replica in _of_kind(search, ready) if replica not in search.tried)

    def forget(self, replica: Replica) -> None:
        """This one has lost its cache."""
        self._prefixes.forget(replica)


def choose(work_tokens: Mapping[_Place, float], holder: _Place | None, *, slack_tokens: int) -> _Place:
    """The place for a request.

    Args:
        work_tokens: outstanding tokens of everyone who could take it; not empty. Of equals the first is taken.
        holder: who has computed its prompt's beginning.
        slack_tokens: the holder is preferred while it has at most so many tokens more to generate than the least busy.
    """
    least = min(work_tokens, key=work_tokens.__getitem__)
    if holder is not None and holder in work_tokens and work_tokens[holder] <= work_tokens[least] + slack_tokens:
        return holder
    return least


def _of_kind(search: Search, replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if search.kind is None or search.kind == replica.kind]


def _fits(search: Search, replica: Replica) -> bool:
    return replica.limits is not None and search.needs.met_by(replica.limits)


def _largest(replicas: Sequence[Replica]) -> list[Replica]:
    lengths = [0 if replica.limits is None else replica.limits.max_model_len for replica in replicas]
    return [replica for replica, length in zip(replicas, lengths, strict=True) if length == max(lengths)]
