"""operations.md and limits.md in docs say what the code says. `python tests/unit/test_operations.py` rewrites them."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from wsbatch.config import EngineConfig, PoolConfig, ServerConfig, Settings
from wsbatch.engine.metrics import EngineMetrics
from wsbatch.server.metrics import Joined, ServerMetrics

ROOT = Path(__file__).parent.parent.parent
OPERATIONS = ROOT / "docs" / "operations.md"
LIMITS = ROOT / "docs" / "limits.md"
ENGINE, SERVER = EngineMetrics(running=lambda: 0, waiting=lambda: 0, cache=lambda: None), ServerMetrics()


def settings_table(config: type[Settings]) -> str:
    lines = ["| setting | default | bounds | what it does |", "|---|---|---|---|"]
    for spec in fields(config):  # type: ignore[arg-type]  # Settings itself is no dataclass, its subclasses are
        meta = spec.metadata
        lines.append(f"| `{spec.name}` | {shown(spec.default)} | {bounds(meta)} | {cell(meta['help'])} |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, str) else f"{value:.12g}"


def bounds(meta: Any) -> str:
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    least, most = ("" if meta[end] is None else shown(meta[end]) for end in ("least", "most"))
    return f"{least} to {most}" if most else f"from {least}" if least else ""


def metrics_table() -> str:
    lines = ["| metric | kind | labels | what it is |", "|---|---|---|---|"]
    for family in Joined(ENGINE.registry, SERVER.registry).collect():
        labels = ", ".join(f"`{name}`" for name in LABELS.get(family.name, ()))
        lines.append(f"| `{family.name}` | {family.type} | {labels} | {cell(family.documentation)} |")
    return "\n".join(lines)


# A family without samples does not tell its labels.
LABELS = {
    "wsbatch_requests_refused": ("code",),
    "wsbatch_request_success": ("finished_reason",),
    "wsbatch_issued_tokens": ("phase",),
    "wsbatch_useful_tokens": ("phase",),
}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = {
    "ServerConfig": lambda: settings_table(ServerConfig),
    "EngineConfig": lambda: settings_table(EngineConfig),
    "metrics": metrics_table,
}


THREATS = re.compile(r"^\| threat or fault .*?(?=\n\n)", re.DOTALL | re.MULTILINE)
DEFAULTS = {
    spec.name: shown(spec.default) for config in (ServerConfig, EngineConfig, PoolConfig) for spec in fields(config)
}


def threats() -> list[list[str]]:
    """The rows of the tables of what is bounded, as cells."""
    tables = THREATS.findall(LIMITS.read_text())
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()[2:]]


def defaults_of(bound: str) -> str:
    """The defaults of the settings that this names, in its order."""
    return ", ".join(DEFAULTS[name] for name in re.findall(r"`(\w+)`", bound) if name in DEFAULTS) or "–"


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- {name} -->\n(.*?)<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    found = section(name).search(OPERATIONS.read_text())
    assert found is not None
    assert found[1] == TABLES[name]() + "\n", "run: python tests/unit/test_operations.py"


def test_every_threat_names_the_setting_that_bounds_it_its_default_and_a_test() -> None:
    rows = threats()
    assert len(rows) > 60
    for row in rows:
        assert len(row) == 5, row
        threat, bound, seen, default, proof = row
        assert seen, threat
        assert default == defaults_of(bound), f"{threat}: run python tests/unit/test_operations.py"
        assert "::test_" in proof, threat
        for name in re.findall(r"`(\w+)`", bound):
            assert name in DEFAULTS or not re.search(r"^max_|_(s|ms|bytes|tokens)$", name), name


def test_every_test_named_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", LIMITS.read_text())
    assert len(named) > 40
    for path, name in named:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"


def test_the_labels_are_those_of_the_code() -> None:
    metrics = [*vars(ENGINE).values(), *vars(SERVER).values()]
    labelled = {m._name: m._labelnames for m in metrics if getattr(m, "_labelnames", ())}
    assert labelled == LABELS


if __name__ == "__main__":
    document = OPERATIONS.read_text()
    for name, table in TABLES.items():
        text = f"<!-- {name} -->\n{table()}\n<!-- end -->"
        document = section(name).sub(lambda _, text=text: text, document)
    OPERATIONS.write_text(document)
    document = LIMITS.read_text()
    for threat, bound, seen, default, proof in threats():
        old, new = (f"| {threat} | {bound} | {seen} | {each} | {proof} |" for each in (default, defaults_of(bound)))
        document = document.replace(old, new)
    LIMITS.write_text(document)
