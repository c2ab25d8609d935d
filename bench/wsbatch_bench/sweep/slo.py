"""A service level objective, and whether a cell meets it: pass, fail, or undecided."""

import re
from dataclasses import dataclass
from typing import Literal

from wsbatch_bench.sweep.cell import CellResult

Verdict = Literal["pass", "fail", "undecided"]

_METRICS = {"e2e_p95": "e2e_p95_s", "ttft_p95": "ttft_p95_s", "tpot_p95": "tpot_p95_s"}
_UNITS = {"s": 1.0, "ms": 0.001}
_LATENCY = re.compile(r"(\w+)\s*<=\s*([\d.]+)\s*(ms|s)")
_SUCCESS = re.compile(r"success\s*>=\s*([\d.]+)\s*%")


@dataclass(frozen=True, slots=True)
class Bound:
    """One condition. `limit` in seconds, or for `success` a share, which is a lower limit."""

    metric: str
    limit: float

    def judge(self, cell: CellResult) -> Verdict:
        """By the bounds of the estimate, not by the estimate: what lies between them is not known."""
        if self.metric == "success":
            return _decide(cell.success_low >= self.limit, cell.success_high < self.limit)
        name = _METRICS[self.metric].removesuffix("_s")
        return _decide(
            getattr(cell, f"{name}_high_s") <= self.limit,
            getattr(cell, f"{name}_low_s") > self.limit,
        )

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

    def limit(self, metric: str) -> float | None:
        """The bound on this metric, where there is one."""
        return next((bound.limit for bound in self.bounds if bound.metric == metric), None)


def parse_slo(text: str) -> Slo:
    """`e2e_p95<=5s,ttft_p95<=1s,tpot_p95<=80ms,success>=99%`. Raises ValueError."""
    bounds = []
    for item in text.split(","):
        if found := _SUCCESS.fullmatch(item.strip()):
            bounds.append(Bound("success", float(found[1]) / 100))
        elif (found := _LATENCY.fullmatch(item.strip())) and found[1] in _METRICS:
            bounds.append(Bound(found[1], float(found[2]) * _UNITS[found[3]]))
        else:
            raise ValueError(
                f"SLO {item.strip()!r}: must be METRIC<=NUMBERs (or ms), METRIC one of "
                f"{', '.join(_METRICS)}; or success>=NUMBER%"
            )
    return Slo(text, tuple(bounds))


def _decide(passes: bool, fails: bool) -> Verdict:
    return "pass" if passes else "fail" if fails else "undecided"
