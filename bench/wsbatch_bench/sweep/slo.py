"""A service level objective, and whether a cell meets it: pass, fail, or undecided."""

import re
from dataclasses import dataclass
from math import ceil, inf, log
from typing import Literal

from wsbatch_bench.numbers import Number
from wsbatch_bench.sweep.cell import CellResult

Verdict = Literal["pass", "fail", "undecided"]

_METRICS = {"e2e_p95": "e2e_p95_s", "ttft_p95": "ttft_p95_s", "tpot_p95": "tpot_p95_s"}
_LATENCIES = 200
_SUCCESS_LEVEL = 0.95
_NEAR_ALL = 0.999
_PERCENT, _TIME = Number(0, 100), Number(0, 86_400_000, above=True)
_UNITS = {"s": 1.0, "ms": 0.001}
_LATENCY = re.compile(r"(\w+)\s*<=\s*([\d.]+)\s*(ms|s)")
_SUCCESS = re.compile(r"success\s*>=\s*([\d.]+)\s*%")


@dataclass(frozen=True, slots=True)
class Bound:
    """One condition. `limit` in seconds, or for `success` a share, which is a lower limit."""

    metric: str
    limit: float

    @property
    def text(self) -> str:
        """As it is given."""
        if self.metric == "success":
            return f"success>={100 * self.limit:g}%"
        return f"{self.metric}<={self.limit:g}s"

    def judge(self, cell: CellResult) -> Verdict:
        """By the bounds of the estimate, not by the estimate: what lies between them is not known."""
        if self.metric == "success":
            return _decide(cell.success_low >= self.limit, cell.success_high < self.limit)
        name = _METRICS[self.metric].removesuffix("_s")
        return _decide(
            getattr(cell, f"{name}_high_s") <= self.limit,
            getattr(cell, f"{name}_low_s") > self.limit,
        )

    @property
    def least_requests(self) -> float:
        """How many measured requests it takes to show that it holds; infinite where no number shows it.

        Of a latency, where requests do not queue: the interval of p95 has an upper bound in 97 of 100 runs of 200
        independent values, in 5 of 100 of 72. For the share of answers, where all of them are answered.
        """
        if self.metric != "success":
            return _LATENCIES
        if self.limit in (0, 1):
            return inf if self.limit else 1
        return ceil(log(1 - _SUCCESS_LEVEL) / log(self.limit))

    def explain(self, cell: CellResult) -> str:
        """The estimate and its bounds against the limit."""
        if self.metric == "success":
            return (
                f"success {cell.success:.1%} ({cell.success_low:.1%} … {cell.success_high:.1%}) against at least "
                f"{self.limit:.1%}: {self.judge(cell)}"
            )
        field = _METRICS[self.metric]
        name = field.removesuffix("_s")
        low, high = getattr(cell, f"{name}_low_s"), getattr(cell, f"{name}_high_s")
        return (
            f"{self.metric} {getattr(cell, field):.3g} s ({low:.3g} … {high:.3g}) against at most {self.limit:g} s: "
            f"{self.judge(cell)}"
        )


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that must all hold."""

    text: str
    bounds: tuple[Bound, ...]

    def judge(self, cell: CellResult) -> Verdict:
        """Pass where every bound certainly holds and the server keeps up; fail where one certainly does not."""
        verdicts: list[Verdict] = [bound.judge(cell) for bound in self.bounds]
        if cell.invalid:
            return "undecided"
        if "fail" in verdicts or cell.verdict == "unstable":
            return "fail"
        return "pass" if set(verdicts) == {"pass"} and cell.verdict == "stable" else "undecided"

    def lacking(self, requests: int) -> list[str]:
        """For each bound that so many measured requests cannot show to hold, how many can."""
        lines = []
        for bound in self.bounds:
            if bound.least_requests == inf:
                near = Bound("success", _NEAR_ALL).least_requests
                lines.append(
                    f"success>=100% is shown by no number of requests: success>={_NEAR_ALL:.1%} takes {near:,.0f}"
                )
            elif bound.least_requests > requests:
                least = f"at least {bound.least_requests:,.0f}"
                if bound.metric != "success":
                    least = f"about {bound.least_requests:,.0f}, where they queue more,"
                lines.append(f"{bound.text} takes {least} measured requests to be shown; there are {requests:,}")
        return lines

    def limit(self, metric: str) -> float | None:
        """The bound on this metric, where there is one."""
        return next((bound.limit for bound in self.bounds if bound.metric == metric), None)


def parse_slo(text: str) -> Slo:
    """`e2e_p95<=5s,ttft_p95<=1s,tpot_p95<=80ms,success>=99%`. Raises ValueError."""
    bounds = []
    for item in text.split(","):
        if found := _SUCCESS.fullmatch(item.strip()):
            bounds.append(Bound("success", _PERCENT.read("SLO: success", found[1]) / 100))
        elif (found := _LATENCY.fullmatch(item.strip())) and found[1] in _METRICS:
            bounds.append(Bound(found[1], _TIME.read(f"SLO: {found[1]}", found[2]) * _UNITS[found[3]]))
        else:
            raise ValueError(
                f"SLO {item.strip()!r}: must be METRIC<=NUMBERs (or ms), METRIC one of "
                f"{', '.join(_METRICS)}; or success>=NUMBER%"
            )
    return Slo(text, tuple(bounds))


def _decide(passes: bool, fails: bool) -> Verdict:
    return "pass" if passes else "fail" if fails else "undecided"
