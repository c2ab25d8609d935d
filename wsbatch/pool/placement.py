"""Which of its replicas a pool sends a request to: `placing`'s rules, for those that may be asked at all."""

from collections.abc import Sequence

import trio

from wsbatch.config import PoolConfig
from wsbatch.pool.placing import PrefixTable, choose
from wsbatch.pool.replica import Replica
from wsbatch.pool.route import Route


class Placement:
    """Remembers who computed which beginning of a prompt."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._prefixes: PrefixTable[Replica] = PrefixTable()

    def place(self, route: Route, ready: Sequence[Replica]) -> Replica | None:
        """The replica for it, of those that are ready: one whose limits take it, that is not full, not ejected, and has
        not been tried. None where there is none."""
        now_s = trio.current_time()
        able = _of_kind(route, ready)
        # Where nobody's limits take it, the largest says so in its own words.
        able = [replica for replica in able if _fits(route, replica)] or _largest(able)
        free = [replica for replica in able if replica not in route.search.tried and replica.retry_after_ms is None]
        # Where all are ejected, they are better than none.
        free = [replica for replica in free if replica.health.admits(now_s)] or free
        if not free:
            return None
        work = {replica: replica.work_tokens for replica in free}
        chosen = choose(work, self._prefixes.holder(route.hashes), slack_tokens=self._config.affinity_tokens)
        self._prefixes.remember(route.hashes, chosen)
        chosen.health.sent(now_s, trial_s=self._config.accept_timeout_s)
        return chosen

    def fits_elsewhere(self, route: Route, ready: Sequence[Replica]) -> bool:
        """Whether the limits of one that has not been tried take it, be it full or not."""
        return any(_fits(route, replica) for replica in _of_kind(route, ready) if replica not in route.search.tried)

    def forget(self, replica: Replica) -> None:
        """This one has lost its cache."""
        self._prefixes.forget(replica)


def _of_kind(route: Route, replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if route.kind is None or route.kind == replica.kind]


def _fits(route: Route, replica: Replica) -> bool:
    return replica.limits is not None and route.search.needs.met_by(replica.limits)


def _largest(replicas: Sequence[Replica]) -> list[Replica]:
    lengths = [0 if replica.limits is None else replica.limits.max_model_len for replica in replicas]
    return [replica for replica, length in zip(replicas, lengths, strict=True) if length == max(lengths)]
