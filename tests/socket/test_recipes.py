"""The code in docs/recipes.md is run as it stands there, addresses and the model's name apart."""

import re
import shutil
import socket
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from wsbatch.client import connect
from wsbatch.config import ServerConfig
from wsbatch.testing import Served, serving

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text()
ADDRESS = "ws://127.0.0.1:8765"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")


def block(title: str, language: str) -> str:
    section = re.split(r"\n## ", TEXT.partition(f"\n## {title}\n")[2])[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, title
    return found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def run(*command: str, cwd: Path) -> str:
    with trio.fail_after(90):
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


async def run_python(code: str, cwd: Path) -> str:
    (cwd / "recipe.py").write_text(code)
    return await run(sys.executable, "recipe.py", cwd=cwd)


def at(code: str, served: Served) -> str:
    assert ADDRESS in code
    return code.replace(ADDRESS, served.server.url)


async def test_in_a_trio_program(tmp_path: Path) -> None:
    code = block("In a Trio program", "python").replace('"demo"', '"simulated"')
    lines = (await run_python(code, tmp_path)).splitlines()
    for prompt in ("Once upon a time", "The sea is", "A recipe for bread:"):
        assert any(line.startswith(prompt) and len(line) == len(prompt) + 33 for line in lines), prompt


async def test_a_server_inside_a_trio_program(tmp_path: Path) -> None:
    code = block("A server inside a Trio program", "python").replace('"demo"', '"simulated"')
    assert len((await run_python(code, tmp_path)).rstrip("\n")) == 16


async def test_from_a_script(tmp_path: Path) -> None:
    async with serving(ServerConfig(port=0)) as served:
        text = await run_python(at(block("From a script or a notebook", "python"), served), tmp_path)
    assert text.startswith("abcdefghijklmnop\n16 tokens,")
    assert text.endswith("abcdefghijklmnopqrstuvwxyzabcdef\n")


async def test_in_a_notebook_where_asyncio_is_running(tmp_path: Path) -> None:
    body = "".join(f"    {line}\n" for line in block("From a script or a notebook", "python").splitlines())
    async with serving(ServerConfig(port=0)) as served:
        code = f"import asyncio\nasync def cell():\n{at(body, served)}\nasyncio.run(cell())\n"
        assert "16 tokens" in await run_python(code, tmp_path)


async def test_seeing_the_batch(tmp_path: Path) -> None:
    async with serving(ServerConfig(port=0, allow_watch=True)) as served:
        text = await run_python(at(block("Seeing the batch", "python"), served), tmp_path)
    assert text == "0 of 8 running; 0 waiting\n"


async def test_testing_your_own_program(tmp_path: Path) -> None:
    lines = (await run_python(block("Testing your own program", "python"), tmp_path)).splitlines()
    assert lines[0] == "181 characters, 182 steps"
    assert lines[1].startswith("Accepted(id=1, prompt_tokens=5")
    assert lines[2].startswith("Tokens(id=1, index=0, token_ids=(97,), text='a'")
    assert lines[3:] == ["out of memory"]


async def test_from_fastapi(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="fastapi and uvicorn are not installed")
    pytest.importorskip("uvicorn", reason="fastapi and uvicorn are not installed")
    shutil.copy(ROOT / "clients" / "asyncio_client.py", tmp_path)
    async with serving(ServerConfig(port=0), interval_s=0.005) as served:
        (tmp_path / "recipe.py").write_text(at(block("From FastAPI", "python"), served))
        port = free_port()
        command = [sys.executable, "-P", "-m", "uvicorn", "recipe:app", "--port", str(port), "--log-level", "error"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.run_process, command, cwd=tmp_path))
            await until_listening(port)
            url = f"http://127.0.0.1:{port}/ask?prompt=hi"
            events = await run("curl", "-sN", f"{url}&max_tokens=3", cwd=tmp_path)
            assert events == 'data: "a"\n\ndata: "b"\n\ndata: "c"\n\n'
            # One who goes away in mid-answer takes the request along.
            with trio.move_on_after(0.5):
                await trio.run_process(["curl", "-sN", f"{url}&max_tokens=100000"], capture_stdout=True)
            with trio.fail_after(10):
                await served.engine.wait_live(0)
            nursery.cancel_scope.cancel()


async def until_listening(port: int) -> None:
    with trio.fail_after(30):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


@pytest.mark.skipif(not (ROOT / "clients/web/node_modules").is_dir(), reason="`npm ci` was not run in clients/web")
async def test_from_javascript() -> None:
    web = ROOT / "clients" / "web"
    async with serving(ServerConfig(port=0)) as served:
        code = at(block("From JavaScript", "js"), served)
        assert await run("node", "--input-type=module", "-e", code, cwd=web) == "abcdefghijklmnop"


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt-get install nginx-light)")
async def test_behind_nginx(tmp_path: Path) -> None:
    port = free_port()
    async with serving(ServerConfig(port=0)) as one, serving(ServerConfig(port=0, drain_s=5)) as two:
        code = block("Behind nginx", "nginx").replace("listen 127.0.0.1:8080", f"listen 127.0.0.1:{port}")
        code = code.replace("127.0.0.1:8765", f"127.0.0.1:{one.server.port}")
        code = code.replace("127.0.0.1:8766", f"127.0.0.1:{two.server.port}")
        paths = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = tmp_path / "nginx.conf"
        config.write_text(
            f"daemon off;\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{paths}{code}}}\n"
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.run_process, [str(NGINX), "-c", str(config), "-p", str(tmp_path)])
            await until_listening(port)
            await talk(f"ws://127.0.0.1:{port}")
            # A server that refuses before the upgrade (draining) costs nobody anything: the other one takes over.
            one.engine.state = "draining"
            for _ in range(4):
                await talk(f"ws://127.0.0.1:{port}")
            page = await run("curl", "-s", f"http://127.0.0.1:{port}/", cwd=tmp_path)
            assert "<title>wsbatch</title>" in page
            nursery.cancel_scope.cancel()


async def talk(url: str) -> None:
    with trio.fail_after(30):
        async with connect(url) as client:
            assert (await client.complete("hi", max_tokens=4)).text == "abcd"
