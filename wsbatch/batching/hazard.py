"""When does waiting for company pay? The arrival hazard, learnt from the gaps between arrivals.

Waiting a moment longer pays while h(g) * S > n: h(g) is the rate at which the next request arrives, given that the last
one came g seconds ago; S is what a request loses by missing the batch, a batch's duration; n requests are held back.
Under Poisson arrivals h is constant; under bursts it is high for small g and then falls: the wait ends with the burst.
"""

from math import floor, log2

_FIRST_EDGE_S = 0.0005
_BINS = 20
_DECAY = 0.98
_EDGES_S = tuple(_FIRST_EDGE_S * 2.0**index for index in range(_BINS))


class ArrivalHazard:
    """A decaying histogram of inter-arrival gaps over doubling bins, and a running mean of batch durations."""

    def __init__(self) -> None:
        self.last_arrival_s = float("-inf")
        self._weights = [0.0] * (_BINS + 1)
        self._batch_s = 0.0

    def arrived(self, now_s: float) -> None:
        """A request arrived."""
        gap_s = max(0.0, now_s - self.last_arrival_s)
        self.last_arrival_s = max(now_s, self.last_arrival_s)
        if gap_s == float("inf"):
            return
        self._weights = [weight * _DECAY for weight in self._weights]
        self._weights[_bin(gap_s)] += 1

    def batch_took(self, seconds: float) -> None:
        """A batch ran this long from dispatch to its last row."""
        self._batch_s = seconds if not self._batch_s else 0.8 * self._batch_s + 0.2 * seconds

    def rate(self, gap_s: float) -> float:
        """Arrivals per second to expect, `gap_s` after the last one; 0 where nothing is known."""
        index = _bin(gap_s)
        survivors = sum(self._weights[index:])
        if index == _BINS or survivors < 1:
            return 0.0
        start_s = _EDGES_S[index - 1] if index else 0.0
        # Gaps that end inside the bin count half of it, the longer ones all of it: the life-table estimate.
        exposed_s = (survivors - self._weights[index] / 2) * (_EDGES_S[index] - start_s)
        return self._weights[index] / exposed_s

    def pays_until_s(self, now_s: float, held: int) -> float:
        """Up to when waiting pays with `held` requests held back: `now_s` or earlier says dispatch now."""
        gap_s = max(0.0, now_s - self.last_arrival_s)
        index = _bin(gap_s)
        if self.rate(gap_s) * self._batch_s <= held:
            return now_s
        while index < _BINS and self.rate(_middle_s(index)) * self._batch_s > held:
            index += 1
        return self.last_arrival_s + (_EDGES_S[index - 1] if index else 0.0)


def _bin(gap_s: float) -> int:
    """The bin of a gap: 0 below the first edge, then one per doubling; the last has no end."""
    if gap_s < _FIRST_EDGE_S:
        return 0
    return min(_BINS, 1 + floor(log2(gap_s / _FIRST_EDGE_S)))


def _middle_s(index: int) -> float:
    start_s = _EDGES_S[index - 1] if index else 0.0
    return (start_s + _EDGES_S[index]) / 2
