"""Imports point one way, read from the syntax trees; torch and trio stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "wsbatch"

# A module may import those of lower rows, and its own row.
ROWS: list[set[str]] = [
    {"messages", "errors", "auth", "origins", "config", "steps", "processes", "memory"},
    {"wire", "text", "batching", "metrics", "model"},
    {"client", "worker", "tokenising", "timers", "watchdog", "patience"},
    {
        "stream",
        "outbox",
        "output",
        "request",
        "core",
        "admission",
        "deadlines",
        "hold",
        "health",
        "engine",
        "batch_engine",
        "isolation",
        "execution",
        "opening",
        "watching",
        "input_budget",
        "connection",
        "peer",
        "wake",
    },
    {"session", "pool"},
    {"transport", "websocket", "http", "handshake", "page", "frame_rate", "endings", "strangers", "accepting"},
    {"server"},
    {"ray"},
    {"testing"},
    {"cli", "__main__", "__init__"},
]


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def row(name: str) -> int:
    return next(index for index, names in enumerate(ROWS) if name in names)


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it; `if TYPE_CHECKING:` blocks do not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = room(path)
    for name in imports(path):
        parts = name.split(".")
        if (
            parts[0] == "wsbatch"
            and len(parts) > 1
            and (ROOT / parts[1]).with_suffix("").name in {room(f) for f in FILES}
        ):
            assert row(parts[1]) <= row(own), f"{own} imports {name}"
            assert own == "testing" or parts[1] != "testing", f"{own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    own = room(path)
    tops = {name.split(".")[0] for name in imports(path)}
    if own != "model":
        assert not tops & {"torch", "transformers"}, own
    if own in ("model", "batching"):
        assert "trio" not in tops
    if own == "batching":
        assert not tops & {"numpy", "time", "random"}
    if own not in ("client", "testing"):
        assert "trio_websocket" not in tops


def test_the_client_stands_on_wire_alone() -> None:
    allowed = {"client", "wire", "messages", "errors", "auth"}
    for path in (ROOT / "client").rglob("*.py"):
        assert {name.split(".")[1] for name in imports(path) if name.startswith("wsbatch.")} <= allowed
