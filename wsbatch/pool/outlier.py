"""A replica that fails what others can do gets no more requests for a while. Plain Python, the time is an argument.

Outlier ejection, as in proxies, with one difference: a failure counts once another replica has done the same request.
One that fails everywhere is itself at fault, and takes no replica away.
"""

from collections import deque
from math import inf

# So many failures among the last outcomes, and the replica is ejected.
EJECTING_FAILURES = 3
OUTCOMES = 20
# The first ejection lasts so long, each further one twice as long as the one before.
FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 60.0


class Outlier:
    """The outcomes of one replica, and whether it is ejected.

    After the time of its ejection one request is sent there on trial. It is back with that one's success, and ejected
    for longer with its failure.
    """

    def __init__(self) -> None:
        self._failures: deque[bool] = deque(maxlen=OUTCOMES)
        self._ejected_until_s: float | None = None
        self._ejection_s = 0.0
        self._trial_until_s = -inf

    @property
    def ejected(self) -> bool:
        """Whether it is, the time of its trial included."""
        return self._ejected_until_s is not None

    def admits(self, now_s: float) -> bool:
        """Whether a request may be sent there: it is not ejected, or due for a trial."""
        return self._ejected_until_s is None or now_s >= max(self._ejected_until_s, self._trial_until_s)

    def sent(self, now_s: float, *, trial_s: float) -> None:
        """A request was sent there. Where that is the trial, it has so long before another one may be sent."""
        if self._ejected_until_s is not None:
            self._trial_until_s = now_s + trial_s

    def succeeded(self, sent_s: float) -> None:
        """It has done a request that was sent there then, or a good part of it."""
        if self._ejected_until_s is not None:
            if sent_s < self._ejected_until_s:  # no trial: it may do what it began before, and nothing else
                return
            self._ejected_until_s = None
            self._failures.clear()
        self._failures.append(False)
        if len(self._failures) == OUTCOMES and not any(self._failures):
            self._ejection_s = 0.0

    def failed(self, now_s: float) -> bool:
        """It has failed a request that another one did. Whether it is ejected with that, for the first time or anew."""
        if self._ejected_until_s is None:
            self._failures.append(True)
            if sum(self._failures) < EJECTING_FAILURES:
                return False
        elif now_s < self._ejected_until_s:  # of before the ejection
            return False
        self._ejection_s = min(LONGEST_EJECTION_S, max(FIRST_EJECTION_S, 2 * self._ejection_s))
        self._ejected_until_s = now_s + self._ejection_s
        self._trial_until_s = -inf
        return True
