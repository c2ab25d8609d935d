"""When does it pay to hold a request back while a batch fills up? Learnt from the gaps between arrivals.

Holding n requests for a moment costs n times that moment; a request that arrives in it and joins gains S, a batch's
duration, which it would have had to sit out. So a moment of waiting pays while h(g) * S > n, with h(g) the hazard: the
rate of arrivals, given that the last one came g seconds ago. Summed over a horizon, waiting from g until g' gains

    P(next gap < g' | it is > g) * S  -  n * E[time waited],

and the best g' is taken (no wait where no horizon gains). Under Poisson arrivals h is constant, and it is all or
nothing; under bursts the best horizon is the spread of a burst.
"""

from math import floor, log2

_FIRST_EDGE_S = 0.0005
_BINS = 20
_DECAY = 0.98
_EDGES_S = (0.0, *(_FIRST_EDGE_S * 2.0**index for index in range(_BINS)))


class ArrivalHazard:
    """A decaying histogram of inter-arrival gaps over doubling bins, and a running mean of batch durations."""

    def __init__(self) -> None:
        self.last_arrival_s = float("-inf")
        self._weights = [0.0] * (_BINS + 1)  # the last one holds the gaps past every edge
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

    def pays_until_s(self, now_s: float, held: int) -> float:
        """Up to when waiting pays with `held` requests held back; `now_s` where it does not."""
        gap_s = max(0.0, now_s - self.last_arrival_s)
        first = _bin(gap_s)
        alive = known = sum(self._weights[first:])
        if known < 1:
            return now_s
        best_gain_s, until_s = 0.0, now_s
        arrived, waited_s = 0.0, 0.0
        for index in range(first, _BINS):
            start_s, end_s = _EDGES_S[index], _EDGES_S[index + 1]
            left = (end_s - max(start_s, gap_s)) / (end_s - start_s)  # of the bin that `gap_s` is in
            ends_here = self._weights[index] * left
            # Gaps that end inside the bin are waited for half of it, longer ones for all: the life-table estimate.
            waited_s += (alive - ends_here / 2) / known * (end_s - start_s) * left
            arrived += ends_here / known
            alive -= ends_here
            gain_s = arrived * self._batch_s - held * waited_s
            if gain_s > best_gain_s:
                best_gain_s, until_s = gain_s, self.last_arrival_s + end_s
        return until_s


def _bin(gap_s: float) -> int:
    """The bin of a gap: 0 below the first edge, then one per doubling; the last has no end."""
    if gap_s < _FIRST_EDGE_S:
        return 0
    return min(_BINS, 1 + floor(log2(gap_s / _FIRST_EDGE_S)))
