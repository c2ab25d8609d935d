"""The drawing of a study: the change of the mean latency, setting by setting, one panel a scenario."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from wsbatch_bench.study import StudyRow

_BETTER, _WORSE, _UNSURE = "#0072b2", "#d55e00", "#888888"


def draw_study(rows: Sequence[StudyRow], paths: Sequence[Path], *, title: str) -> None:
    """Points with 95 % intervals; blue is certainly faster than the base, vermilion certainly slower."""
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    labels = list(dict.fromkeys(row.setting.label for row in rows))
    figure, panels = plt.subplots(
        1, len(scenarios), figsize=(2.2 + 2.1 * len(scenarios), 1.3 + 0.42 * len(labels)), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, scenario in zip(panels[0], scenarios, strict=True):
        for row in rows:
            if row.scenario != scenario:
                continue
            change = row.change
            colour = _BETTER if change.high < 0 else _WORSE if change.low > 0 else _UNSURE
            place = labels.index(row.setting.label)
            low, high = change.value - change.low, change.high - change.value
            stable = row.summary.stability.verdict == "stable"
            axes.errorbar(
                100 * change.value, place, xerr=[[100 * low], [100 * high]], fmt="o", color=colour, markersize=6,
                capsize=3, fillstyle="full" if stable else "none",
            )  # fmt: skip
            axes.annotate(
                _percent(change.value), (100 * change.value, place), xytext=(0, 7), textcoords="offset points",
                ha="center", fontsize=8, color=colour,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_title(scenario, fontsize=9)
        axes.margins(x=0.12)
        axes.grid(visible=True, axis="x", color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(labels)), labels, fontsize=9)
    panels[0][0].set_ylim(len(labels) - 0.5, -0.7)
    figure.supxlabel(f"mean end-to-end latency against {labels[0]}, %", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)


def _percent(share: float) -> str:
    whole = round(100 * share)
    return f"{whole:+d} %".replace("-", "−") if whole else "0"
