"""One request's search for a replica that takes it: which were asked, what they said, and what one must take."""

from collections.abc import Callable
from dataclasses import replace

from wsbatch.errors import Draining, EngineDead, NeverFits, QueueFull, QuotaExceeded, RequestError, Shed, TooLarge
from wsbatch.messages import GenerateRequest
from wsbatch.pool.placing import needs
from wsbatch.pool.replica import Replica

RETRY_MS = 500
"""For a client to come back, where no replica has said when."""

# Refusals that are about the replica and not about the request: another one may take it.
_ELSEWHERE = frozenset(error.code for error in (QueueFull, Draining, EngineDead, QuotaExceeded, Shed))
LARGER = frozenset(error.code for error in (NeverFits, TooLarge))
"""Refusals that are about the replica's limits: one with larger limits may take it."""


class Search:
    """Begins anew with each replica that accepts the request.

    Attributes:
        tried: replicas that are not to be asked: they have been, or have just lost or failed the request.
        needs: what a replica must take, as far as is known.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.tried: set[Replica] = set()
        self.needs = needs(request)
        self._refusals: list[RequestError] = []

    def refused(
        self, replica: Replica, error: RequestError, *, was_sent: bool, fits_elsewhere: Callable[[], bool]
    ) -> bool:
        """A replica refuses it, or would; whether another one may take it. `fits_elsewhere` asks whether any meets
        `needs`."""
        if error.code in _ELSEWHERE:
            self._refusals.append(error)
            return True
        limits = replica.limits
        if error.code not in LARGER or limits is None:
            return False
        if was_sent:  # so the message was not too large, but its prompt
            self.needs = replace(self.needs, model_len=max(self.needs.model_len, limits.max_model_len + 1))
        else:
            self.needs = replace(self.needs, message_bytes=limits.max_message_bytes + 1)
        return fits_elsewhere()

    def found(self) -> None:
        """A replica has accepted it."""
        self.tried.clear()
        self._refusals.clear()

    def give_up(self) -> QueueFull | None:
        """No replica is left to ask, and the next search may ask all again. What to tell the client, by what those
        said that refused; None where none did."""
        refusals, self._refusals = self._refusals, []
        self.tried.clear()
        if not refusals:
            return None
        retries = [error.retry_after_ms for error in refusals if error.retry_after_ms is not None]
        retry_after_ms = max(50, min(retries, default=RETRY_MS))
        return QueueFull(f"no replica has room: {refusals[0].message}", retry_after_ms=retry_after_ms)
