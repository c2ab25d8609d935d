"""The drawing of a scaling curve: step time with its fitted line, and efficiency with the knee."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from wsbatch_bench.scaling import Scaling

_MEASURED, _FITTED, _IDEAL = "#0072b2", "#d55e00", "#888888"


def draw_scaling(scaling: Scaling, paths: Sequence[Path], *, efficiency: float, title: str) -> None:
    """Left: milliseconds a decode step. Right: tokens a second and the efficiency, the knee marked."""
    figure, (steps, rates) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    sizes = [point.batch for point in scaling.points]
    fit = scaling.fit
    steps.plot(sizes, [1000 * p.step_s for p in scaling.points], "o-", color=_MEASURED, label="measured, median")
    steps.plot(
        sizes, [1000 * fit.step_s(size) for size in sizes], "--", color=_FITTED,
        label=f"τ + αb: τ = {1000 * fit.tau_s.value:.1f} ms, α = {1000 * fit.alpha_s.value:.2f} ms",
    )  # fmt: skip
    steps.set_ylabel("decode step, ms")
    steps.set_ylim(bottom=0)
    first = scaling.points[0]
    rates.plot(sizes, [p.goodput for p in scaling.points], "o-", color=_MEASURED, label="measured")
    ideal = [first.goodput * size / first.batch for size in sizes]
    rates.plot(sizes, ideal, ":", color=_IDEAL, label="if a step cost the same at any size")
    rates.set_yscale("log")
    rates.set_ylabel("output tokens/s (log scale)")
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for point in scaling.points:
        rates.annotate(
            f"{point.efficiency:.0%}", (point.batch, point.goodput), xytext=(0, -14), textcoords="offset points",
            ha="center", fontsize=8, color="#444444",
        )  # fmt: skip
    knee = scaling.knee(efficiency)
    if knee is not None:
        rates.axvline(knee, color=_FITTED, linewidth=1)
        rates.annotate(
            f"knee: {knee} is the largest\nwith efficiency ≥ {efficiency:.0%}", (knee, 0.04),
            xycoords=("data", "axes fraction"), xytext=(-6, 0), textcoords="offset points", ha="right", fontsize=9,
            color=_FITTED,
        )  # fmt: skip
    for axes in (steps, rates):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("batch size")
        axes.grid(visible=True, color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
    rates.margins(y=0.15)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)
