"""What the stages found, as text."""

from typing import Any

from lab_tools.gpu.supervise import Outcome, Row


def table(rows: list[Row]) -> list[str]:
    """Neighbouring rows with the same keys under one heading, a row without such a neighbour as `key: value`."""
    lines: list[str] = []
    for index, row in enumerate(rows):
        before, after = (tuple(rows[at]) if 0 <= at < len(rows) else () for at in (index - 1, index + 1))
        if tuple(row) not in (before, after):
            lines.append(", ".join(f"{name}: {_text(value)}" for name, value in row.items()))
            continue
        if tuple(row) != before:
            lines.append("  ".join(f"{name:>14}" for name in row))
        lines.append("  ".join(f"{_text(value):>{max(14, len(name))}}" for name, value in row.items()))
    return lines


def knee(rows: list[Row]) -> Row:
    """Where decode stops being memory-bound, from the rows of the stage `decode`; empty where it measured none.

    `compute_bound_from`: the first batch whose multiplications take longer than its reads, both at the device's best.
    `knee`: the largest batch with half the efficiency of the smallest, as `wsbatch-bench scaling` defines it: its step
    takes at most twice as long, so up to there a row costs less than half of what it costs alone.
    """
    points = [row for row in rows if "step_ms" in row]
    if not points:
        return {}
    compute = [row["rows"] for row in points if row["compute_limit_ms"] > row["memory_limit_ms"]]
    return {
        "compute_bound_from": min(compute, default="none of these: every row's own KV is read, too"),
        "knee": max(row["rows"] for row in points if row["step_ms"] <= 2 * points[0]["step_ms"]),
    }


def summary(outcomes: dict[str, Outcome]) -> list[str]:
    """One line a stage, and why those that are not ok are not."""
    lines = [f"{'stage':10} {'result':10} {'seconds':>8}"]
    lines += [f"{name:10} {outcome.status:10} {outcome.seconds:8.1f}" for name, outcome in outcomes.items()]
    for name, outcome in outcomes.items():
        if outcome.reason:
            lines += ["", f"{name} ({outcome.status}): {outcome.reason.strip()}"]
    return lines


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
