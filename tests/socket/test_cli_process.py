"""The commands as processes: what they print, how they end, what a signal does. Served by the simulated model."""

import json
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from wsbatch.cli.descriptors import OTHER_DESCRIPTORS

WSBATCH = [sys.executable, "-P", "-m", "wsbatch"]
# For whatever must happen: never waited out in a run that passes.
PATIENCE_S = 60
FOREVER = "simulated:tau_ms=86400000"
UNHURRIED = "simulated:tau_ms=20"


def ipv6_is_there() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


Start = Callable[..., "subprocess.Popen[str]"]


class Server:
    """A `wsbatch serve` that listens."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        line = process.stdout.readline()
        found = re.fullmatch(r"listening on (ws://127\.0\.0\.1:(\d+))\n", line)
        assert found is not None, f"{line!r} {rest_of(process)}"
        self.url = found[1]
        self.port = int(found[2])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
            return text


def rest_of(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end; exit status and the rest of both outputs."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def line_with(stream: "IO[str] | None", words: str) -> str:
    """Read up to the line that has these words."""
    assert stream is not None
    for line in stream:
        if words in line:
            return line
    raise AssertionError(f"ended without {words!r}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts commands; none outlives its test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str, program: list[str] = WSBATCH, **options: object) -> "subprocess.Popen[str]":
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*program, *arguments], text=True, **{**pipes, **options})  # type: ignore[call-overload]
        processes.append(process)
        return process

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def serve(start: Start) -> Callable[..., Server]:
    """Starts servers, on free ports unless told otherwise."""

    def serve(*flags: str, model: str = "simulated:tau_ms=1", port: int = 0) -> Server:
        return Server(start("serve", "--model", model, "--port", str(port), *flags))

    return serve


def test_a_completion_comes_as_text_and_as_frames(serve: Callable[..., Server], start: Start) -> None:
    server = serve()
    status, text, err = rest_of(start("generate", "--url", server.url, "Hello", "--max-tokens", "20"))
    assert (status, err) == (0, "")
    assert len(text) == 20  # a byte each, and nothing but the text where nobody watches

    status, out, err = rest_of(start("generate", "--url", server.url, "Hello", "--max-tokens", "20", "--json"))
    assert (status, err) == (0, "")
    frames = [json.loads(line) for line in out.splitlines()]
    kinds = [frame["type"] for frame in frames]
    assert kinds[:2] == ["hello", "accepted"]
    assert set(kinds[2:-1]) == {"tokens"}
    assert kinds[-1] == "finished"
    assert "".join(frame.get("text", "") for frame in frames) == text


def test_a_prompt_from_stdin_is_the_same_prompt(serve: Callable[..., Server], start: Start) -> None:
    server = serve()
    ask = ("generate", "--url", server.url, "--max-tokens", "9")
    piped = start(*ask, "-", stdin=subprocess.PIPE)
    out, _ = piped.communicate("two\nlines", timeout=PATIENCE_S)
    assert out == rest_of(start(*ask, "two\nlines"))[1]
    assert out != rest_of(start(*ask, "--chat", "two\nlines"))[1]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--max-tokens", "-1"], 1, "max_tokens"),
        (["--temperature", "nan"], 1, "temperature"),
        (["--url", "http://127.0.0.1"], 2, "ws://"),
        (["--url", "ws://127.0.0.1:1"], 1, "cannot connect"),
        (["--max-tokens", "x"], 2, "--max-tokens"),
    ],
)
def test_an_error_is_one_line(
    flags: list[str], status: int, words: str, serve: Callable[..., Server], start: Start
) -> None:
    server = serve()
    got, out, err = rest_of(start("generate", "--url", server.url, "Hello", *flags))
    assert (got, out) == (status, "")
    assert words in err
    assert err.startswith("wsbatch generate: ")
    assert err.count("\n") == 1


def test_a_server_with_a_token_wants_it(
    serve: Callable[..., Server], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("--auth-token", "sesame")
    ask = ("generate", "--url", server.url, "Hello", "--max-tokens", "3")
    status, _, err = rest_of(start(*ask))
    assert (status, "token" in err) == (1, True)
    assert rest_of(start(*ask, "--token", "sesame"))[0] == 0
    assert rest_of(start(*ask, env={**os.environ, "WSBATCH_AUTH_TOKEN": "sesame"}))[0] == 0


def test_a_reader_that_leaves_is_no_traceback(serve: Callable[..., Server], start: Start) -> None:
    server = serve()
    asking = start("generate", "--url", server.url, "Hello", "--max-tokens", "2000")
    assert asking.stdout is not None
    assert asking.stderr is not None
    asking.stdout.read(1)
    asking.stdout.close()
    assert asking.wait(PATIENCE_S) == 141
    assert asking.stderr.read() == ""


def test_ctrl_c_cancels_the_request(serve: Callable[..., Server], start: Start) -> None:
    server = serve(model=UNHURRIED)
    asking = start("generate", "--url", server.url, "Hello", "--max-tokens", "8000", "--json")
    line_with(asking.stdout, '"tokens"')
    asking.send_signal(signal.SIGINT)
    status, _, err = rest_of(asking)
    assert (status, err) == (130, "")
    server.terminate()  # which would wait for the request for half a minute
    assert rest_of(server.process)[0] == 0
    assert asking.returncode == 130


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "simulated:tau_s=1"], "--model"),
        (["--model", "simulated", "--certfile", "/none.pem", "--keyfile", "/none.pem"], "--certfile"),
        (["--model", "simulated", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_a_server_that_cannot_start_says_why(flags: list[str], words: str, start: Start) -> None:
    status, out, err = rest_of(start("serve", "--log-level", "error", "--port", "0", *flags))
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_what_nobody_expected_of_a_model_is_one_line_too(start: Start) -> None:
    program = (
        "import sys, wsbatch.engine.open, wsbatch.cli\n"
        "def load(*arguments):\n"
        "    raise KeyError('model_type')\n"
        "wsbatch.engine.open._load = load\n"
        "sys.exit(wsbatch.cli.main(['serve', '--log-level', sys.argv[1]]))\n"
    )
    process = start("error", program=[sys.executable, "-P", "-c", program])
    assert rest_of(process) == (2, "", "wsbatch serve: KeyError: 'model_type'\n")
    _, _, err = rest_of(start("debug", program=[sys.executable, "-P", "-c", program]))
    assert "in load" in err  # for whoever has to find out


def test_a_server_listens_on_every_host(serve: Callable[..., Server]) -> None:
    server = serve("--host", "127.0.0.1", "--host", "127.0.0.2")
    assert server.get("/readyz") == "ready\n"
    assert "127.0.0.2" in line_with(server.process.stderr, "too")
    with urllib.request.urlopen(f"http://127.0.0.2:{server.port}/readyz", timeout=PATIENCE_S) as answer:
        assert answer.status == 200


@pytest.mark.skipif(not ipv6_is_there(), reason="there is no IPv6 on this machine")
def test_every_ipv6_address_is_every_ipv4_address_too(start: Start) -> None:
    process = start("serve", "--model", "simulated", "--port", "0", "--host", "[::]")
    assert process.stdout is not None
    port = int(process.stdout.readline().rpartition(":")[2])
    for host in ("127.0.0.1", "[::1]"):
        with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=PATIENCE_S) as answer:
            assert answer.status == 200


def test_a_host_that_cannot_be_is_named(start: Start) -> None:
    status, _, err = rest_of(start("serve", "--model", "simulated", "--port", "0", "--host", "127.0.0.1,192.0.2.1"))
    assert status == 2
    assert re.search(r"wsbatch serve: cannot listen on 192\.0\.2\.1:\d+: ", err)


def test_a_port_in_use_is_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, _, err = rest_of(start("serve", "--log-level", "error", "--model", "simulated", "--port", port))
    assert status == 2
    assert err == f"wsbatch serve: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals, serve: Callable[..., Server], start: Start) -> None:
    server = serve(model=UNHURRIED)
    asking = start("generate", "--url", server.url, "Hello", "--max-tokens", "40", "--json")
    line_with(asking.stdout, '"tokens"')
    server.process.send_signal(number)
    line_with(server.process.stderr, "draining")
    status, out, _ = rest_of(asking)
    last = json.loads(out.splitlines()[-1])
    assert (status, last["type"], last["finish_reason"]) == (0, "finished", "length")
    assert last["usage"]["completion_tokens"] == 40
    assert rest_of(server.process)[0] == 0


def test_after_the_grace_the_rest_is_told_shutdown(serve: Callable[..., Server], start: Start) -> None:
    server = serve("--drain-s", "0.1", model=UNHURRIED)
    asking = start("generate", "--url", server.url, "Hello", "--max-tokens", "8000", "--json")
    line_with(asking.stdout, '"tokens"')
    server.terminate()
    _, out, _ = rest_of(asking)
    assert json.loads(out.splitlines()[-1])["finish_reason"] == "shutdown"
    assert rest_of(server.process)[0] == 0


def test_a_second_signal_ends_a_server_whose_step_hangs(serve: Callable[..., Server], start: Start) -> None:
    server = serve(model=FOREVER)
    asking = start("generate", "--url", server.url, "Hello", "--json")
    line_with(asking.stdout, '"accepted"')
    server.terminate()
    line_with(server.process.stderr, "draining")
    assert server.process.poll() is None
    server.terminate()
    status, _, err = rest_of(server.process)
    assert status == 1
    assert "Traceback" not in err
    assert rest_of(asking)[0] == 1


def test_a_step_that_hangs_does_not_hold_the_process_past_its_grace(serve: Callable[..., Server], start: Start) -> None:
    server = serve("--drain-s", "1", model=FOREVER)
    asking = start("generate", "--url", server.url, "Hello", "--json")
    line_with(asking.stdout, '"accepted"')
    server.terminate()
    assert json.loads(rest_of(asking)[1].splitlines()[-1])["finish_reason"] == "shutdown"
    status, _, err = rest_of(server.process)
    assert status == 70
    assert "leaving without it" in err


def test_the_server_may_open_as_many_files_as_its_connections_need(start: Start) -> None:
    """Under a shell that allows fewer; and it says so where the system does not let it have them."""
    for max_connections, allowed, warned in ((300, 2 * 300 + OTHER_DESCRIPTORS, False), (600, 1000, True)):
        limited = ["sh", "-c", 'ulimit -Sn 500 && ulimit -Hn 1000 && exec "$@"', "sh", *WSBATCH]
        flags = ["--model", "simulated:tau_ms=1", "--port", "0", "--max-connections", str(max_connections)]
        server = Server(start("serve", *flags, program=limited))
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (allowed, 1000)
        server.terminate()
        status, _, err = rest_of(server.process)
        assert status == 0
        assert ("max_connections 600 can need" in err) == warned


def test_a_step_that_stalls_ends_the_server_after_its_clients_are_told(
    serve: Callable[..., Server], start: Start
) -> None:
    server = serve("--step-stall-s", "0.2", model=FOREVER)
    asking = start("generate", "--url", server.url, "Hello", "--json")
    status, out, err = rest_of(asking)
    assert (status, json.loads(out.splitlines()[-1])["code"]) == (1, "engine_dead")
    assert "no progress" in err
    status, _, err = rest_of(server.process)
    assert status == 70
    assert "engine died" in err
    assert "Traceback" not in err


def test_a_signal_during_the_load_ends_it(start: Start) -> None:
    # The load cannot be interrupted: it has a thread of its own, here one that waits for ever.
    program = (
        "import sys, threading, wsbatch.engine.open, wsbatch.cli\n"
        "def load(*arguments):\n"
        "    print('loading', flush=True)\n"
        "    threading.Event().wait()\n"
        "wsbatch.engine.open._load = load\n"
        "sys.exit(wsbatch.cli.main(['serve']))\n"
    )
    process = start(program=[sys.executable, "-P", "-c", program])
    line_with(process.stdout, "loading")
    process.send_signal(signal.SIGTERM)
    status, out, err = rest_of(process)
    assert (status, out) == (143, "")
    assert "Traceback" not in err


def test_the_probes_answer(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.get("/readyz") == "ready\n"
    assert "wsbatch_num_requests_running 0.0" in server.get("/metrics")


def test_a_demo_of_the_simulated_model(start: Start) -> None:
    status, out, err = rest_of(start("demo", "--model", "simulated", "--once", "--max-tokens", "50"))
    assert (status, err) == (0, "")
    assert re.search(r"^simulated on ws://127\.0\.0\.1:\d+\n\n> What", out)
    assert re.search(r"\n.{50}\n\n\[50 tokens, TTFT \d+\.\d\d s, \d+\.\d tokens/s\]\n$", out)


def test_a_demo_stays_up(start: Start) -> None:
    demo = start("demo", "--model", "simulated", "--max-tokens", "5")
    line = line_with(demo.stdout, "wsbatch generate --url")
    url = re.findall(r"ws://\S+", line)[0]
    assert rest_of(start("generate", "--url", url, "Hello", "--max-tokens", "3"))[0] == 0
    demo.send_signal(signal.SIGINT)
    assert rest_of(demo)[0] == 0


def test_a_conversation_through_a_pipe(serve: Callable[..., Server], start: Start, tmp_path: Path) -> None:
    server = serve()
    flags = ("--url", server.url, "--max-tokens", "8", "--temperature", "0")
    chat = start("chat", *flags, stdin=subprocess.PIPE)
    out, err = chat.communicate(f"one\n\none\n/save {tmp_path}/talk\n/quit\n/stop\nlast\n", timeout=PATIENCE_S)
    assert chat.returncode == 0
    first, second, *rest = out.splitlines()
    assert [len(line) for line in (first, second, *rest)] == [8] * 6  # a line that begins with / is a message, too
    assert second != first  # the conversation is sent each time
    assert not (tmp_path / "talk").exists()
    assert "\x1b" not in out + err
    assert err.count("tokens/s]") == 6
    alone = start("chat", *flags, "--system", "Be brief.", stdin=subprocess.PIPE)
    assert alone.communicate("one\n", timeout=PATIENCE_S)[0].strip() != first


def test_a_conversation_that_outgrows_the_context_goes_on_without_its_oldest_turns(
    serve: Callable[..., Server], start: Start
) -> None:
    server = serve("--max-model-len", "200")
    chat = start("chat", "--url", server.url, stdin=subprocess.PIPE)
    lines = [f"question {number}" for number in range(12)]
    out, err = chat.communicate("".join(f"{line}\n" for line in [*lines, "x" * 200]), timeout=PATIENCE_S)
    assert [len(line) for line in out.splitlines()] == [100] * 12  # half of the context is the answer's
    assert "no longer fit" in err
    # The last one does not fit by itself: that is an error.
    assert chat.returncode == 1
    assert re.match(r"wsbatch chat: .*at most 200", err.splitlines()[-1])


def test_an_unanswered_message_ends_a_piped_conversation(serve: Callable[..., Server], start: Start) -> None:
    server = serve()
    chat = start("chat", "--url", server.url, "--top-p", "7", stdin=subprocess.PIPE)
    out, err = chat.communicate("one\ntwo\n", timeout=PATIENCE_S)
    assert (chat.returncode, out) == (1, "")
    assert err.startswith("wsbatch chat: top_p")
    assert err.count("\n") == 1


def test_an_answer_survives_the_server(serve: Callable[..., Server], start: Start) -> None:
    server = serve(model=UNHURRIED)
    flags = ("--max-tokens", "100", "--seed", "5", "--temperature", "1")
    whole = start("chat", "--url", server.url, *flags, stdin=subprocess.PIPE)
    expected, _ = whole.communicate("Hello\n", timeout=PATIENCE_S)

    chat = start("chat", "--url", server.url, *flags, stdin=subprocess.PIPE)
    assert chat.stdin is not None
    assert chat.stdout is not None
    chat.stdin.write("Hello\n")
    chat.stdin.close()
    chat.stdin = None  # communicate would flush it
    begun = chat.stdout.read(10)
    server.process.kill()
    server.process.wait()
    serve(model=UNHURRIED, port=server.port)
    status, rest, err = rest_of(chat)
    assert status == 0
    assert begun + rest == expected
    assert "trying again" in err


class Terminal:
    """A pseudo-terminal, and what was shown on it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._shown = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def until(self, pattern: str) -> str:
        """Wait until what was shown since the last call matches; returns it."""
        by = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self._shown)):
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, by - time.monotonic()))
            assert ready, f"no {pattern!r} in {self._shown!r}"
            self._shown += os.read(self._descriptor, 65_536).decode(errors="replace")
        seen, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return seen


@contextmanager
def terminal() -> Iterator[tuple[Terminal, int]]:
    """The person's side, and the descriptor for the process."""
    ours, theirs = pty.openpty()
    try:
        yield Terminal(ours), theirs
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_conversation_at_a_terminal(serve: Callable[..., Server], start: Start, tmp_path: Path) -> None:
    server = serve(model=UNHURRIED)
    with terminal() as (person, tty):
        chat = start(
            "chat",
            "--url",
            server.url,
            "--max-tokens",
            "8000",
            stdin=tty,
            stdout=tty,
            stderr=tty,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        person.until("simulated at your service.*\n.*> ")
        person.type("Hello\r")
        shown = person.until(r"\x1b\[\?25l")  # rich draws: the cursor is hidden
        chat.send_signal(signal.SIGINT)
        shown = person.until(r"stopped\][^>]*> ")
        assert "\x1b[?25h" in shown
        person.type("Again\r")
        person.until(r"\x1b\[\?25l(?s:.*)[!-~]{12}")  # some of the answer
        person.type("/stop\r")
        assert "/stop" not in person.until(r"stopped\][^>]*> ")  # not echoed into the answer
        person.type("/system Be brief.\r")
        person.until(r"system message set\][^>]*> ")
        person.type(f"/save {tmp_path}/talk.json\r")
        person.until(r"saved to (?s:.*)> ")
        person.type("/save ~nobody-is-called-that/talk.md\r")
        person.until(r"no such home directory\][^>]*> ")
        person.type("/reset\r")
        person.until(r"forgotten\][^>]*> ")
        person.type(f"/save {tmp_path}/fresh.md\r")
        person.until(r"saved to (?s:.*)> ")
        chat.send_signal(signal.SIGINT)
        person.until("to leave.*\n.*> ")
        person.type("\x04")
        assert chat.wait(PATIENCE_S) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved[0] == {"role": "system", "content": "Be brief."}
    assert saved[-2] == {"role": "user", "content": "Again"}
    assert saved[-1]["role"] == "assistant"
    assert (tmp_path / "fresh.md").read_text() == "**system**\n\nBe brief.\n"
