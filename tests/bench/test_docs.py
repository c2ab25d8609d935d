"""What the documents tell to run is there, and so is what they refer to."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "bench/lab/README.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_files_exist(document: Path) -> None:
    text = document.read_text()
    for command in re.findall(r"(?:^|`|\$ )wsbatch-bench ([a-z]\w+)", text, re.MULTILINE):
        assert hasattr(importlib.import_module(f"wsbatch_bench.cli.{command}"), "add_command"), command
    for path in re.findall(r"\bbench/[\w/]+\.(?:py|sh)\b", text):
        assert (ROOT / path).is_file(), path
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (document.parent / link).exists(), link


def test_the_kept_results_are_charts_tables_and_pages() -> None:
    kinds = {path.suffix for path in (ROOT / "docs/results").rglob("*.*")}
    assert kinds == {".png", ".csv", ".md", ".json"}
