"""Whatever is typed or read: one line that names what is wrong and its bounds, and never another exception."""

import argparse
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from wsbatch_bench.cli import main, make_parser
from wsbatch_bench.load.trace import load_trace
from wsbatch_bench.numbers import Number
from wsbatch_bench.plan.pool_sim import PoolStage
from wsbatch_bench.sweep.setting import parse_costs

COSTS = "tau_ms=10,alpha_ms=1,beta_ms=0.1"
COMMANDS: dict[str, list[str]] = {
    "load": ["ws://127.0.0.1:1"],
    "sweep": ["--out", "out", "--overwrite"],
    "choose": ["--rate", "3", "--slo", "ttft_p95<=1s", "--costs", COSTS],
    "study": ["waiting"],
    "static": ["--model", "simulated"],
    "scaling": ["--model", "simulated"],
    "plan": ["--rate", "3", "--slo", "ttft_p95<=1s", "--cost-model", COSTS],
}

T = TypeVar("T")
WORDS = ["nan", "inf", "-inf", "-5", "-0.0", "0", "1e400", "1e-400", "-1e18", "1e18", "9" * 5000, "2.5", "3", "", " ",
         "x", "0x10", "1_0", "٣", "true", "--", "1e3\n2", "\0", "[" * 5000]  # fmt: skip
KINDS = ["poisson", "gamma", "constant", "bursts", "on-off", "closed", "lognormal", "fixed", "empirical", "dynamic",
         "continuous", "costs", "ttft", "e2el"]  # fmt: skip
KEYS = ["burstiness", "k", "spread_ms", "requests", "duty", "clients", "think_ms", "median", "sigma", "min", "max",
        "tokens", "max_batch_size", "max_wait_ms", "length_buckets", "tau_ms", "alpha_ms", "beta_ms"]  # fmt: skip
WORD = st.sampled_from(WORDS)
ITEMS = st.lists(st.builds("{}={}".format, st.sampled_from(KEYS), WORD), max_size=4).map(",".join)
JUNK = st.one_of(
    WORD,
    st.lists(WORD, max_size=3).map(",".join),
    ITEMS,
    st.builds("{}:{}".format, st.sampled_from(KINDS), st.one_of(ITEMS, WORD)),
    st.builds("{}{}{}".format, st.sampled_from(["ttft_p95<=", "success>=", "e2e_p95<", "3x", "ws://"]), WORD,
              st.sampled_from(["", "s", "ms", "%", "x7"])),
    st.text(max_size=20),
)  # fmt: skip


class Ran(Exception):
    """The command has taken what it was given, and would have begun to work."""


def ran(*_: object, **__: object) -> NoReturn:
    raise Ran


def flags(command: str) -> list[argparse.Action]:
    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return [each for each in commands.choices[command]._actions if each.nargs != 0 and each.option_strings]


FLAGS = [(command, action.option_strings[-1], action.type) for command in COMMANDS for action in flags(command)]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WSBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(trio, "run", ran)
    for module, name in (
        ("sweep.stage", "server_process"),
        ("sweep.grid", "ProcessPoolExecutor"),
        ("plan.planner", "ProcessPoolExecutor"),
        ("cli.static", "load_bare"),
        ("cli.scaling", "load_bare"),
    ):
        monkeypatch.setattr(import_module(f"wsbatch_bench.{module}"), name, ran)
    monkeypatch.setattr(PoolStage, "run", ran)


def outcome(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """The line about what is wrong; None where nothing is."""
    capsys.readouterr()
    with pytest.raises((Ran, SystemExit)) as ended:
        main(argv)
    if isinstance(ended.value, Ran):
        return None
    said = capsys.readouterr().err
    assert ended.value.code == 2, (argv, said)
    assert said.count("\n") == 1, (argv, said)
    assert said.startswith(f"wsbatch-bench {argv[0]}: "), (argv, said)
    return said


@pytest.mark.usefixtures("nothing_runs")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flag=st.sampled_from(FLAGS), junk=JUNK)
def test_junk_in_any_flag_is_one_line(
    flag: tuple[str, str, Any], junk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name, type_ = flag
    said = outcome([command, *COMMANDS[command], f"{name}={junk}"], capsys)
    if said is not None and isinstance(getattr(type_, "__self__", None), Number):
        assert name in said


@pytest.mark.usefixtures("nothing_runs")
def test_every_flag_that_takes_a_number_refuses_the_same_junk(capsys: pytest.CaptureFixture[str]) -> None:
    numeric = [each for each in FLAGS if isinstance(getattr(each[2], "__self__", None), Number)]
    assert len(numeric) > 40
    for command, name, _ in numeric:
        for junk in ("nan", "-inf", "-1e30", "9e99", "", "x"):
            said = outcome([command, *COMMANDS[command], f"{name}={junk}"], capsys)
            assert said is not None, (command, name, junk)
            assert f"argument {name}: is " in said
            assert "must be a" in said
    # No flag reads a number in a way of its own.
    assert not [each for each in FLAGS if each[2] in (int, float)]


def read(function: Callable[[Path], T], path: Path) -> T | None:
    """What it makes of the file; None where it refuses, by name."""
    try:
        return function(path)
    except ValueError as error:
        if str(path) not in str(error):
            raise
        return None


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.sampled_from([1, 2, 0.5, "poisson", "gamma:burstiness=nan", "replay", 10**400]),
)  # fmt: skip
NAMES = ["at_s", "unit", "offset_s", "prompt_tokens", "output_tokens"]
HEAD = ["format", "arrivals", "prompts", "outputs", "seed", "natural_rate"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    head=st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(HEAD, VALUES)),
    entries=st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES)) | VALUES, max_size=3),
)
@example(head=None, entries=[{"at_s": float("nan"), "prompt_tokens": 1, "output_tokens": 1}])
@example(head=None, entries=[{"at_s": t, "prompt_tokens": 1, "output_tokens": 1} for t in (0, 1e-12)])
def test_junk_in_a_trace_is_a_line_that_names_it(head: Any, entries: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = ([] if head is None else [{"format": "wsbatch-trace-1"} | head]) + entries
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read(load_trace, path)
    if trace is not None:
        next(trace.schedule(trace.natural_rate or 1.0))
        assert trace.closed is None or trace.closed.clients


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fits=VALUES | st.dictionaries(st.sampled_from(["dynamic", "x"]), VALUES | st.fixed_dictionaries(
    dict.fromkeys(("tau_s", "alpha_s", "beta_s"), VALUES))))  # fmt: skip
def test_junk_in_a_file_of_costs_is_a_line_that_names_it(fits: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(fits))
    costs = read(lambda path: parse_costs(str(path)), path)
    if costs is not None:
        assert all(each.tau_s + each.alpha_s > 0 for each in costs.values())
