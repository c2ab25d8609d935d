"""docs/architecture.md names every module of the package in its wing, and no other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "wsbatch"
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def modules(wing: str) -> set[str]:
    """The modules of one wing, or of the root (an empty name), by their paths in it."""
    folder = PACKAGE / wing
    paths = folder.rglob("*.py") if wing else folder.glob("*.py")
    return {path.relative_to(folder).as_posix() for path in paths} - {"__init__.py", "gguf/__init__.py"}


def named(wing: str) -> list[str]:
    """The modules in the first column of the wing's table."""
    (section,) = re.findall(rf"^### `wsbatch/{wing}`.*?(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `([\w/]+\.py)` \| \S", section, re.MULTILINE)


WINGS = sorted(f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


@pytest.mark.parametrize("wing", ["", *WINGS])
def test_every_module_is_named_in_its_wing(wing: str) -> None:
    found = named(wing)
    assert sorted(found) == sorted(modules(wing))


def test_every_wing_is_in_the_drawing() -> None:
    (drawing,) = re.findall(r"^## The wings.*?```text\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)
    assert [wing for wing in WINGS if wing not in drawing] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_the_paths_in_a_document_lead_somewhere(path: Path) -> None:
    named = re.findall(r"`((?:wsbatch|wsbatch_bench|tests|bench|clients|docs)/[\w./]*)(?:::\w+)?`", path.read_text())
    roots = (ROOT, ROOT / "bench")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []
