"""docs/replicas.md has every setting of routers and fleets. `python tests/unit/test_replicas_doc.py` writes it anew."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from wsbatch.config import FleetConfig, PoolConfig, Settings

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "replicas.md"
TABLES: dict[str, type[Settings]] = {"PoolConfig": PoolConfig, "FleetConfig": FleetConfig}


def table(config: type[Settings]) -> str:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    for spec in fields(config):  # type: ignore[arg-type]  # Settings itself is no dataclass, its subclasses are
        default = "none" if spec.default is None else f"{spec.default:.12g}"
        lines.append(f"| `{spec.name}` | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)


def block(text: str, name: str) -> re.Match[str]:
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=\n<!-- end -->)", text, re.DOTALL)
    assert found is not None, name
    return found


@pytest.mark.parametrize("name", TABLES)
def test_the_settings(name: str) -> None:
    assert block(DOCUMENT.read_text(), name)[0] == table(TABLES[name])


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, config in TABLES.items():
        found = block(text, name)
        text = text[: found.start()] + table(config) + text[found.end() :]
    DOCUMENT.write_text(text)
