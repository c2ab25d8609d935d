"""Imports point one way, read from the syntax trees; torch and trio stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "wsbatch"

# A wing may import those of lower rows, and itself; in its own row, nothing else.
ROWS: list[set[str]] = [
    {"messages", "errors", "auth", "config", "steps", "nurseries"},
    {"wire", "text", "batching"},
    {"model"},
    {"client", "engine"},
    {"server"},
    {"pool"},
    {"testing"},
    {"cli", "__main__", "__init__"},
]
FREE = ROWS[0] | ROWS[-1]
"""What stands in the root, and the commands, which may import others of their row."""

# The rooms of the engine: what decides, without a clock or a task of its own; then what runs it.
PURE = {
    "metrics",
    "outbox",
    "output",
    "deadlines",
    "batch_wait",
    "health",
    "watch",
    "request",
    "admission",
    "live",
    "core",
}
SHELL = {"stream", "interface", "worker", "isolation", "watchdog", "tokenization", "execution", "loop", "open"}


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
            if row(parts[1]) == row(own):
                assert parts[1] == own or own in FREE, f"{own} imports {name}"


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


def test_the_core_of_the_engine_has_neither_tasks_nor_a_clock() -> None:
    rooms = {path.stem: path for path in (ROOT / "engine").glob("*.py")}
    assert set(rooms) - {"__init__"} == PURE | SHELL
    for name in PURE:
        found = imports(rooms[name])
        assert not {each.split(".")[0] for each in found} & {"trio", "time", "torch", "threading"}, name
        inner = {each.split(".")[2] for each in found if each.startswith("wsbatch.engine.")}
        assert inner <= PURE, f"{name} imports {inner - PURE}"


def test_the_client_stands_on_wire_alone() -> None:
    allowed = {"client", "wire", "messages", "errors", "auth", "nurseries"}
    for path in (ROOT / "client").rglob("*.py"):
        assert {name.split(".")[1] for name in imports(path) if name.startswith("wsbatch.")} <= allowed
