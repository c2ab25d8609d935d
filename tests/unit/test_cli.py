"""The command line without its commands' work: flags, their errors, their help."""

import os
import re
from dataclasses import fields
from typing import Any

import pytest

import wsbatch
from wsbatch.cli import main, route, serve
from wsbatch.config import EngineConfig, FleetConfig, PoolConfig, ServerConfig

CONFIGS = [EngineConfig, ServerConfig]
SETTINGS = [pytest.param(config, spec, id=spec.name) for config in CONFIGS for spec in fields(config)]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """What `wsbatch serve` would have served."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    def host(engine: EngineConfig, server: ServerConfig, *, while_serving: object) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr(serve, "host", host)
    monkeypatch.setattr(serve, "set_up_logging", lambda level: None)
    return calls


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(("config", "spec"), SETTINGS)
def test_every_setting_is_a_flag_with_its_help_and_default(
    config: type[Any], spec: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of("serve", capsys)
    flag = "--" + spec.name.replace("_", "-")
    assert re.search(rf"{flag}\b", text)
    # Long words are broken at hyphens, and lines at spaces: compare without either.
    assert spec.metadata["help"].replace(" ", "") in text.replace(" ", "")
    if isinstance(spec.default, int | float) and not isinstance(spec.default, bool):
        assert f"default:{spec.default:.12g})" in text.replace(" ", "")


def test_no_flags_are_the_defaults(served: list[tuple[EngineConfig, ServerConfig]]) -> None:
    assert main(["serve"]) == 0
    assert served == [(EngineConfig(), ServerConfig())]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--model", "./here"], "model", "./here"),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--threads", "3"], "threads", 3),
        (["--max-batch-size", "4"], "max_batch_size", 4),
        (["--max-wait-ms", "2.5"], "max_wait_ms", 2.5),
        (["--max-wait-ms", "2"], "max_wait_ms", 2.0),
        (["--length-buckets", "16, 64,256"], "length_buckets", (16, 64, 256)),
        (["--length-buckets", "16", "--length-buckets", "64"], "length_buckets", (16, 64)),
        (["--host", "127.0.0.1", "--host", "::1"], "host", "127.0.0.1,::1"),
        (["--adaptive-wait"], "adaptive_wait", True),
        (["--no-adaptive-wait"], "adaptive_wait", False),
        (["--port", "0"], "port", 0),
        (["--auth-token", "secret\n"], "auth_token", "secret"),
        (
            ["--allow-origins", "https://a.example:443/,HTTPS://b.example"],
            "allow_origins",
            ("https://a.example", "https://b.example"),
        ),
        (["--allow-origins", "*"], "allow_origins", ()),
    ],
)
def test_a_flag_sets_its_field(
    flags: list[str], name: str, value: object, served: list[tuple[EngineConfig, ServerConfig]]
) -> None:
    assert main(["serve", *flags]) == 0
    ((engine, server),) = served
    config = engine if hasattr(engine, name) else server
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-batch-size", "0"], ["--max-batch-size", "0", "at least 1"]),
        (["--max-batch-size", "5000"], ["--max-batch-size", "5000", "at most 4096"]),
        (["--max-batch-size", "many"], ["--max-batch-size", "'many'", "whole number"]),
        (["--max-wait-ms", "nan"], ["--max-wait-ms", "nan", "number"]),
        (["--max-wait-ms", "soon"], ["--max-wait-ms", "'soon'", "not a number"]),
        (["--dtype", "int3"], ["--dtype", "'int3'", "bfloat16"]),
        (["--length-buckets", "64,16"], ["--length-buckets", "(64, 16)", "increasing"]),
        (["--length-buckets", "0"], ["--length-buckets", "at least 1"]),
        (["--port", "65536"], ["--port", "65536", "at most 65535"]),
        (["--certfile", "x.pem"], ["--certfile", "--keyfile", "together"]),
        (["--allow-origins", "app.example"], ["--allow-origins", "'app.example'", "https://host"]),
        (["--auth-token", "s3\ncret"], ["--auth-token", "control characters"]),
        (["--max-batch", "4"], ["--max-batch"]),  # no abbreviations
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it_and_its_bound(
    flags: list[str],
    words: list[str],
    served: list[tuple[EngineConfig, ServerConfig]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        status: object = main(["serve", *flags])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert served == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert "Config" not in captured.err
    assert "cret" not in captured.err


EMPTY = [
    ("serve", spec.name)
    for config in (*CONFIGS, FleetConfig)
    for spec in fields(config)
    if not isinstance(spec.default, bool)
]
EMPTY += [("route", spec.name) for spec in fields(PoolConfig)]
EMPTY += [("serve", "ray"), ("route", "replica_token"), ("demo", "prompt"), ("demo", "model")]
EMPTY += [(command, name) for command in ("generate", "chat", "top") for name in ("url", "token", "cafile")]
EMPTY += [("chat", "system"), ("generate", "stop")]
ARGUMENTS = {"route": ["ws://127.0.0.1:1"], "generate": ["Hello"]}


@pytest.mark.parametrize(("command", "name"), EMPTY)
def test_a_flag_that_is_given_and_empty_is_refused(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(SystemExit) as exit_:
        main([command, *ARGUMENTS.get(command, []), flag, ""])
    assert exit_.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        *((each, "WSBATCH_AUTH_TOKEN") for each in ("serve", "route", "generate", "chat", "top")),
        ("route", "WSBATCH_REPLICA_TOKEN"),
    ],
)
@pytest.mark.parametrize("value", ["", " \n"])
def test_a_variable_that_is_set_and_empty_is_refused(
    command: str, variable: str, value: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        status = main([command, *ARGUMENTS.get(command, [])])
    assert status == 2
    assert f"${variable} is empty" in capfd.readouterr().err


def test_the_replicas_token_comes_from_the_environment_unless_a_flag_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str | None] = []

    def open_pool(urls: list[str], config: PoolConfig, *, auth_token: str | None) -> None:
        tokens.append(auth_token)

    monkeypatch.setattr("wsbatch.pool.open_pool", open_pool)
    monkeypatch.setattr(route, "set_up_logging", lambda level: None)
    monkeypatch.setattr(route, "host_engine", lambda opening, config, while_serving: opening() or 0)
    monkeypatch.setenv("WSBATCH_AUTH_TOKEN", "clients")
    main(["route", "ws://127.0.0.1:1"])
    monkeypatch.setenv("WSBATCH_REPLICA_TOKEN", "environment\n")
    main(["route", "ws://127.0.0.1:1"])
    main(["route", "ws://127.0.0.1:1", "--replica-token", "flag"])
    assert tokens == ["clients", "environment", "flag"]


def test_the_token_comes_from_the_environment_unless_a_flag_gives_it(
    served: list[tuple[EngineConfig, ServerConfig]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WSBATCH_AUTH_TOKEN", "from-the-environment")
    main(["serve"])
    main(["serve", "--auth-token", "from-the-flag"])
    assert [server.auth_token for _, server in served] == ["from-the-environment", "from-the-flag"]


@pytest.mark.parametrize("command", ["serve", "demo", "generate", "chat"])
def test_help_has_examples_of_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, capsys)
    assert "examples:" in text
    assert text.count(f"wsbatch {command}") >= 3


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^ +{command} ", text, re.MULTILINE) for command in ("serve", "demo", "generate", "chat"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"wsbatch {wsbatch.__version__}\n"


def test_public_names_are_there_and_nothing_else_is() -> None:
    for name in wsbatch.__all__:
        assert getattr(wsbatch, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        wsbatch.no_such_name  # noqa: B018
