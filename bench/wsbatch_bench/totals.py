"""The server's own accounting, read from its /metrics before and after a run."""

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

_NO_PHASES: dict[str, float] = {"prefill": 0.0, "decode": 0.0}


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
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("code") or sample.labels.get("phase") or ""
            samples[sample.name.removeprefix("wsbatch_"), label] = sample.value

    def by_label(name: str) -> dict[str, float]:
        return {label: value for (metric, label), value in samples.items() if metric == name and label}

    return ServerTotals(
        prompt_tokens=samples.get(("prompt_tokens_total", ""), 0.0),
        generation_tokens=samples.get(("generation_tokens_total", ""), 0.0),
        refused=by_label("requests_refused_total"),
        issued_tokens=_NO_PHASES | by_label("issued_tokens_total"),
        useful_tokens=_NO_PHASES | by_label("useful_tokens_total"),
        steps=samples.get(("batch_size_count", ""), 0.0),
        rows=samples.get(("batch_size_sum", ""), 0.0),
        step_seconds=samples.get(("step_seconds_sum", ""), 0.0),
    )


def _minus(later: dict[str, float], earlier: dict[str, float]) -> dict[str, float]:
    return {key: value - earlier.get(key, 0.0) for key, value in later.items()}
