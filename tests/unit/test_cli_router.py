"""The command line of routers: they send at once what their replicas have merged, and their help says so."""

import re

import pytest

from wsbatch.cli import main, route, serve
from wsbatch.config import ServerConfig

COMMANDS = [
    pytest.param(route, ["route", "ws://127.0.0.1:1"], id="route"),
    pytest.param(serve, ["serve", "--ray", "local", "--replicas", "3"], id="serve --ray"),
]


@pytest.mark.parametrize(("module", "command"), COMMANDS)
@pytest.mark.parametrize(("flags", "frame_interval_ms"), [([], 0.0), (["--frame-interval-ms", "7"], 7.0)])
def test_a_router_holds_no_frame_back_unless_told_to(
    module: object, command: list[str], flags: list[str], frame_interval_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ServerConfig] = []

    def host_engine(opening: object, server: ServerConfig, *, while_serving: object) -> int:
        served.append(server)
        return 0

    monkeypatch.setattr(module, "host_engine", host_engine)
    monkeypatch.setattr(module, "set_up_logging", lambda level: None)
    assert main([*command, *flags]) == 0
    assert [config.frame_interval_ms for config in served] == [frame_interval_ms]


@pytest.mark.parametrize(("command", "default"), [("route", 0), ("serve", 5)])
def test_the_help_says_the_commands_own_default(command: str, default: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.search(rf"--frame-interval-ms X shortest time [^-]* \(0 to 1000; default: {default}\)", text)
