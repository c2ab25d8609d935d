"""The README does what it says: its programs run, its frames are the protocol's, its commands are CI's."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from wsbatch.messages import BatchReport, Limits, Timing, Usage
from wsbatch.wire import JSON

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


# What stands for `{…}` in the frames.
ABRIDGED = {
    "limits": asdict(Limits(max_model_len=8192, max_message_bytes=8_388_608, max_live_requests=64, max_logprobs=20)),
    "usage": asdict(Usage(prompt_tokens=5, completion_tokens=3)),
    "timing": asdict(Timing(queue_ms=5.2, prefill_ms=31.0, ttft_ms=36.2, total_ms=78.9)),
    "batch": asdict(BatchReport(max_size=1, mean_size=1.0, issued_tokens=7, useful_tokens=7, hol_delay_ms=0.0)),
}

EMBEDDING, CLIENT = blocks("python")


@pytest.fixture
def url() -> Iterator[str]:
    command = [sys.executable, "-P", "-m", "wsbatch", "serve", "--model", "simulated:tau_ms=0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("listening on ").strip()
        server.terminate()


def run(program: str, **replacements: str) -> str:
    """What the program prints, after the replacements that let it run here; each must be there to be made."""
    for old, new in replacements.items():
        assert old in program
        program = program.replace(old, new)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_an_engine_in_a_program() -> None:
    output = run(EMBEDDING, demo="simulated:tau_ms=0,alpha_ms=0", **{"trio.sleep(60)": "trio.sleep(0)"})
    text, listening = output.splitlines()
    assert len(text) == 256
    assert re.fullmatch(r"listening on ws://127\.0\.0\.1:\d+", listening)


def test_a_client_in_a_program(url: str) -> None:
    assert len(run(CLIENT, **{"ws://127.0.0.1:8765": url})) == 64


def test_a_client_in_one_line(url: str) -> None:
    (call,) = re.findall(r"`(wsbatch\.client\.generate\(.*?)`", README)
    assert len(run(f"import wsbatch.client\nprint({call}, end='')", url=repr(url), prompt="'Hello'")) == 256


@pytest.mark.parametrize("program", [EMBEDDING, CLIENT], ids=["embedding", "client"])
def test_a_program_is_short(program: str) -> None:
    assert len(program.splitlines()) <= 20


def test_the_frames_are_the_protocols() -> None:
    (frames,) = (block for block in blocks("text") if "→" in block)
    lines = frames.splitlines()
    assert len(lines) == 10
    for line in lines:
        sender, _, frame = line.partition(" ")
        frame = re.sub(r'"(\w+)": \{…\}', lambda found: f'"{found[1]}": {json.dumps(ABRIDGED[found[1]])}', frame)
        assert (JSON.decode_client if sender == "→" else JSON.decode_server)(frame) is not None


def test_each_set_up_is_one_command_that_needs_nothing_before_it() -> None:
    demo, tests = (block.strip() for block in blocks("sh") if "pip install" in block)
    for command, last in ((demo, "wsbatch demo"), (tests, "pytest")):
        assert "\n" not in command
        venv, install, ending = command.split(" && ")
        assert venv == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install -c .ci/constraints.txt -e ")
        assert ending == f".venv/bin/{last}"


def test_the_test_command_is_what_ci_runs() -> None:
    _, tests = (block for block in blocks("sh") if "pip install" in block)
    _, install, run_tests = tests.strip().split(" && ")
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert install.replace(".venv/bin/pip install", "pip install --quiet") in ci
    assert run_tests.removeprefix(".venv/bin/") in ci


def test_the_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
