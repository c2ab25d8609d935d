"""A server as the bench sees it: a process of its own, and the accounting that its /metrics shows."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Timer
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from wsbatch.model.processes import module_command

_START_S = 300.0  # a model may have to be fetched and converted
_END_S = 60.0
_NO_PHASES: dict[str, float] = {"prefill": 0.0, "decode": 0.0}

Metrics: TypeAlias = dict[tuple[str, str], float]
"""Values by (name, label); the label is that of the only dimension a metric has, empty where it has none."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that listens at `url`."""

    pid: int
    url: str

    @property
    def port(self) -> int:
        """Of `url`."""
        return int(self.url.rpartition(":")[2])


def wsbatch_command(command: str, *flags: str) -> list[str]:
    """`wsbatch COMMAND FLAGS` on a free port, as a command line for `server_process`."""
    return module_command("wsbatch", command, "--port", "0", "--log-level", "warning", *flags)


@contextmanager
def server_process(command: Sequence[str]) -> Iterator[ServerProcess]:
    """Run a server in a process of its own while the block runs. Its first line of output ends with its URL.

    Blocks until it listens, and at the end, after SIGTERM, until it is gone. Raises RuntimeError where it does not
    start within five minutes, or has failed by the end.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    patience = Timer(_START_S, process.kill)
    patience.start()
    try:
        words = process.stdout.readline().split()
        patience.cancel()
        if not words:
            raise RuntimeError(f"the server did not start: exit status {process.wait()}")
        yield ServerProcess(process.pid, words[-1])
    finally:
        patience.cancel()
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    if process.returncode not in (0, -signal.SIGTERM):
        raise RuntimeError(f"the server ended with status {process.returncode}")


def parse_metrics(text: str) -> Metrics:
    """From Prometheus' text format."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """Sums since the server's start, or between two scrapes.

    Attributes:
        prompt_tokens: of admitted requests.
        generation_tokens: of requests that reached their `finished`.
        refused: refusals and failures by code.
        issued_tokens, useful_tokens: token slots by phase (prefill, decode).
        steps, rows: model steps, and rows in them; `step_seconds`: their time in the model.
    """

    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    refused: dict[str, float] = field(default_factory=dict)
    issued_tokens: dict[str, float] = field(default_factory=lambda: dict(_NO_PHASES))
    useful_tokens: dict[str, float] = field(default_factory=lambda: dict(_NO_PHASES))
    steps: float = 0.0
    rows: float = 0.0
    step_seconds: float = 0.0

    def since(self, earlier: "ServerTotals") -> "ServerTotals":
        """What was added after `earlier`."""
        return ServerTotals(
            self.prompt_tokens - earlier.prompt_tokens,
            self.generation_tokens - earlier.generation_tokens,
            _minus(self.refused, earlier.refused),
            _minus(self.issued_tokens, earlier.issued_tokens),
            _minus(self.useful_tokens, earlier.useful_tokens),
            self.steps - earlier.steps,
            self.rows - earlier.rows,
            self.step_seconds - earlier.step_seconds,
        )

    @property
    def slot_utilization(self) -> float:
        """Useful over issued decode slots; nan before the first."""
        issued = self.issued_tokens.get("decode", 0.0)
        return self.useful_tokens.get("decode", 0.0) / issued if issued else float("nan")

    @property
    def waste_fraction(self) -> float:
        """The share of all issued token slots, prefill's padding included, that nobody asked for; nan before any."""
        issued = sum(self.issued_tokens.values())
        return 1 - sum(self.useful_tokens.values()) / issued if issued else float("nan")

    @property
    def mean_rows(self) -> float:
        """Rows in a step, on average; nan before the first."""
        return self.rows / self.steps if self.steps else float("nan")


def parse_totals(text: str) -> ServerTotals:
    """From Prometheus' text format. What the server does not count is 0."""
    metrics = parse_metrics(text)

    def value(name: str) -> float:
        return metrics.get((f"wsbatch_{name}", ""), 0.0)

    def by_label(name: str) -> dict[str, float]:
        return {label: value for (metric, label), value in metrics.items() if metric == f"wsbatch_{name}" and label}

    return ServerTotals(
        prompt_tokens=value("prompt_tokens_total"),
        generation_tokens=value("generation_tokens_total"),
        refused=by_label("requests_refused_total"),
        issued_tokens=_NO_PHASES | by_label("issued_tokens_total"),
        useful_tokens=_NO_PHASES | by_label("useful_tokens_total"),
        steps=value("batch_size_count"),
        rows=value("batch_size_sum"),
        step_seconds=value("step_seconds_sum"),
    )


def _minus(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    return {key: value - earlier.get(key, 0.0) for key, value in later.items()}
