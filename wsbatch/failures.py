"""The model's failures: told to the log, and counted, until it is the model that is in question and no request."""

import logging
from collections import deque
from collections.abc import Collection

from wsbatch.errors import StepFailed

_logger = logging.getLogger("wsbatch.engine")

SUSPICIOUS = 3
_LOGGED = 10
_LOG_PERIOD_S = 60.0


class Failures:
    """Failed steps in a row; a step that gives anybody a token ends the row.

    Attributes:
        in_a_row: steps in which something failed, and that gave no token, since the last that gave one.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._logged_s: deque[float] = deque(maxlen=_LOGGED)
        self._unlogged = 0

    def __repr__(self) -> str:
        return f"<Failures {self.in_a_row} in a row>"

    @property
    def suspicious(self) -> bool:
        """Whether it may be the model that is broken."""
        return self.in_a_row >= SUSPICIOUS

    def record(self, failures: Collection[StepFailed], *, tokens: int, now_s: float) -> None:
        """One step is over: what failed in it, and how many tokens it gave."""
        if tokens:
            self.in_a_row = 0
        elif failures:
            self.in_a_row += 1
        for failure in failures:
            self._log(failure, now_s)

    def _log(self, failure: StepFailed, now_s: float) -> None:
        """Tell the log, ten times a minute at most: it must not be for a client to fill it."""
        if len(self._logged_s) == _LOGGED and now_s - self._logged_s[0] < _LOG_PERIOD_S:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more were not logged)" if self._unlogged else ""
        self._logged_s.append(now_s)
        self._unlogged = 0
        _logger.warning("the model failed: %s%s", failure, more, exc_info=failure.__cause__)
