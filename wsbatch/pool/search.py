"""One request's search for a replica that takes it: which one may be asked, and what those said that were."""

from collections.abc import Sequence
from dataclasses import replace

from wsbatch.errors import Draining, EngineDead, NeverFits, QueueFull, QuotaExceeded, RequestError, Shed, TooLarge
from wsbatch.messages import GenerateRequest
from wsbatch.pool.needs import needs
from wsbatch.pool.prefixes import beginnings
from wsbatch.pool.replica import Kind, Replica

_RETRY_MS = 500  # for a client to come back, where no replica has said when
_LEAST_RETRY_MS = 50

ELSEWHERE = frozenset(error.code for error in (QueueFull, Draining, EngineDead, QuotaExceeded, Shed))
"""Refusals that are about the replica and not about the request: another one may take it."""
LARGER = frozenset(error.code for error in (NeverFits, TooLarge))
"""Refusals that are about the replica's limits: one with larger limits may take it."""


class Search:
    """Begins anew with each replica that accepts the request.

    Attributes:
        tried: replicas that are not to be asked: they have been, or have just lost or failed the request.
        needs: what a replica must take, as far as is known.
        kind: of the replica that generated the first token, which the next one must be of; None before that.
        hashes: of the prompt's beginnings.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.tried: set[Replica] = set()
        self.needs = needs(request)
        self.kind: Kind | None = None
        self.hashes = beginnings(request)
        self._refusals: list[RequestError] = []

    def was_full(self, error: RequestError) -> bool:
        """A replica refuses it, or would; whether that is about the replica alone, and any other may take it."""
        if error.code in ELSEWHERE:
            self._refusals.append(error)
            return True
        return False

    def was_too_large(self, replica: Replica, error: RequestError, *, was_sent: bool) -> bool:
        """The same: whether it is about the replica's limits, and one that meets `needs` may take it."""
        limits = replica.limits
        if error.code not in LARGER or limits is None:
            return False
        if was_sent:  # so the message was not too large, but its prompt
            self.needs = replace(self.needs, model_len=max(self.needs.model_len, limits.max_model_len + 1))
        else:
            self.needs = replace(self.needs, message_bytes=limits.max_message_bytes + 1)
        return True

    def found(self) -> None:
        """A replica has accepted it."""
        self.tried.clear()
        self._refusals.clear()

    def give_up(self) -> QueueFull | None:
        """No replica is left to ask, and the next search may ask all again. What to tell the client, by what those
        said that refused; None where none did."""
        refusals, self._refusals = self._refusals, []
        self.tried.clear()
        return no_room(refusals) if refusals else None


def no_room(refusals: Sequence[RequestError]) -> QueueFull:
    """What to tell a client that no replica has room for, by what those said that refused."""
    retries = [error.retry_after_ms for error in refusals if error.retry_after_ms is not None]
    why = f": {refusals[0].message}" if refusals else ""
    return QueueFull(f"no replica has room{why}", retry_after_ms=max(_LEAST_RETRY_MS, min(retries, default=_RETRY_MS)))
