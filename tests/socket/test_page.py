"""The browser page's files over HTTP: what is served, as what, and nothing beyond."""

import re
from pathlib import Path

import pytest
import trio

from wsbatch.config import ServerConfig
from wsbatch.server.page import FILES
from wsbatch.testing import Served, serving

WEB = Path(__file__).parents[2] / "clients" / "web"


async def ask(served: Served, target: str, *headers: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """One request whose target goes over the wire as it is: no client tidies it up."""
    stream = await served.tcp()
    lines = [f"{method} {target} HTTP/1.1", "Host: test", *headers]
    await stream.send_all("".join(f"{line}\r\n" for line in lines).encode() + b"\r\n")
    data = b""
    async for part in stream:
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}, body


async def test_every_file_is_served_as_what_it_is() -> None:
    async with serving(ServerConfig(port=0)) as served:
        for name in FILES:
            status, headers, body = await ask(served, f"/{name}")
            assert (status, body) == (200, (WEB / name).read_bytes()), name
            assert headers["x-content-type-options"] == "nosniff"
            kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
            assert headers["content-type"].startswith(kinds.get(name.rsplit(".")[-1], "text/plain")), name
        status, headers, body = await ask(served, "/?url=ws://elsewhere&token=x")
        assert (status, body) == (200, (WEB / "index.html").read_bytes())
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "target",
    [
        "/../pyproject.toml",
        "/..%2fpyproject.toml",
        "/test/../../../pyproject.toml",
        "/test",
        "/test/",
        "/package.json",
        "/test/server.mjs",
        "/node_modules/ws/package.json",
        "//page.js",
        "/page.js/",
        "/page.js%00",
        "/PAGE.JS",
        "/./page.js",
        "/etc/passwd",
    ],
)
async def test_nothing_else_is(target: str) -> None:
    async with serving(ServerConfig(port=0)) as served:
        status, _, body = await ask(served, target)
        assert status == 404
        assert b"Nothing here" in body


async def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    async with serving(ServerConfig(port=0)) as served:
        status, headers, body = await ask(served, "/page.js")
        tag = headers["etag"]
        assert headers["cache-control"] == "no-cache"
        status, headers, body = await ask(served, "/page.js", f"If-None-Match: {tag}")
        assert (status, body, headers["etag"]) == (304, b"", tag)
        assert "content-length" not in headers
        assert (await ask(served, "/page.js", 'If-None-Match: "older"'))[0] == 200
        status, headers, body = await ask(served, "/page.js", method="HEAD")
        assert (status, body, int(headers["content-length"])) == (200, b"", (WEB / "page.js").stat().st_size)
        status, headers, _ = await ask(served, "/page.js", method="POST")
        assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_all_that_the_page_refers_to_is_served_and_packaged() -> None:
    referred = set(re.findall(r'(?:href|src)="([^"#:]+)"', (WEB / "index.html").read_text()))
    for script in WEB.glob("*.js"):
        referred |= set(re.findall(r'(?:from|import\() ?"\./([^"]+)"', script.read_text()))
    assert referred <= set(FILES)
    assert set(FILES) >= {path.name for path in WEB.iterdir() if path.suffix in {".js", ".css", ".html", ".svg", ".ts"}}


async def test_the_probe_tells_a_page_whether_its_token_is_right_and_an_orchestrator_nothing_new() -> None:
    async with serving(ServerConfig(port=0, auth_token="s3cret")) as served:
        for target, wanted in (("", 200), ("?token=s3cret", 200), ("?token=wrong", 401), ("?token=", 401)):
            status, headers, body = await ask(served, f"/readyz{target}", "Origin: http://page.example")
            assert status == wanted, target
            assert headers["access-control-allow-origin"] == "*"
        assert b'"unauthorized"' in body
        assert (await ask(served, "/livez?token=wrong"))[0] == 200
    async with serving(ServerConfig(port=0)) as served:
        assert (await ask(served, "/readyz?token=any"))[0] == 200


async def test_only_pages_that_may_connect_may_read_the_probe() -> None:
    config = ServerConfig(port=0, allow_origins=("http://page.example",))
    async with serving(config) as served:
        with trio.fail_after(30):
            _, headers, _ = await ask(served, "/readyz", "Origin: http://page.example")
            assert headers["access-control-allow-origin"] == "http://page.example"
            assert headers["vary"] == "Origin"
            _, headers, _ = await ask(served, "/readyz", "Origin: http://evil.example")
            assert "access-control-allow-origin" not in headers
            status, _, _ = await ask(served, "/readyz")
            assert status == 200
