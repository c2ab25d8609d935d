"""Whether the model works: its failures are logged and counted, until it is the model that is in question."""

import logging
from collections import deque
from collections.abc import Collection

from wsbatch.errors import StepFailed

_logger = logging.getLogger("wsbatch.engine")

SUSPICIOUS = 3
PROBES = 3
_PROBE_TOKENS = 16
_LOGGED = 10
_LOG_PERIOD_S = 60.0


class ModelHealth:
    """Counts failed steps in a row; a step that gives anybody a token ends the row.

    Attributes:
        in_a_row: steps in which something failed, and that gave no token, since the last that gave one.
        doubtful: whether a probe of the model has failed: nothing is to be let in until the next one.
    """

    def __init__(self, *, vocab_size: int) -> None:
        self.in_a_row = 0
        self.doubtful = False
        self._vocab_size = vocab_size
        self._proven: tuple[int, ...] = ()  # the beginning of a prompt that gave a token
        self._logged_s: deque[float] = deque(maxlen=_LOGGED)
        self._unlogged = 0

    def __repr__(self) -> str:
        return f"<ModelHealth {self.in_a_row} failures in a row{', doubtful' if self.doubtful else ''}>"

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

    def succeeded(self, prompt_ids: tuple[int, ...]) -> None:
        """A step gave a token to the request with this prompt."""
        self._proven = self._proven or prompt_ids[:_PROBE_TOKENS]

    def probe_ids(self, attempt: int) -> tuple[int, ...]:
        """The prompt of a probe: the beginning of one that gave a token, where there ever was one.

        No client can make that fail. Without one, another id at each attempt: 0, 1 or 2.
        """
        return self._proven or (attempt * self._vocab_size // PROBES,)

    def _log(self, failure: StepFailed, now_s: float) -> None:
        """Tell the log, ten times a minute at most: it must not be for a client to fill it."""
        if len(self._logged_s) == _LOGGED and now_s - self._logged_s[0] < _LOG_PERIOD_S:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more were not logged)" if self._unlogged else ""
        self._logged_s.append(now_s)
        self._unlogged = 0
        _logger.warning("the model failed: %s%s", failure, more, exc_info=failure.__cause__)
