"""Plain HTTP on the WebSocket port, asked by the standard library's client."""

import http.client
import json

import pytest
import trio

from wsbatch.config import ServerConfig
from wsbatch.errors import QueueFull
from wsbatch.server.metrics import ServerMetrics
from wsbatch.testing import ScriptedEngine, Served, serving


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.reason = response.reason
        self.headers = response.headers
        self.body = response.read()


async def fetch(served: Served, path: str, method: str = "GET", *, port: int | None = None) -> Reply:
    def talk() -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port or served.server.port, timeout=10)
        try:
            connection.request(method, path)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    return await trio.to_thread.run_sync(talk)


async def test_probes_of_a_healthy_server() -> None:
    async with serving(ServerConfig(port=0)) as served:
        for path, body in (("/livez", b"alive\n"), ("/readyz", b"ready\n"), ("/readyz?verbose=1", b"ready\n")):
            reply = await fetch(served, path)
            assert (reply.status, reply.reason, reply.body) == (200, "OK", body)
            assert reply.headers["connection"] == "close"


async def test_probes_may_have_a_port_of_their_own() -> None:
    async with serving(ServerConfig(port=0, probe_port=0)) as served:
        ((_, port),) = served.server.probe_addresses
        assert port != served.server.port
        for path, body in (("/livez", b"alive\n"), ("/readyz", b"ready\n")):
            reply = await fetch(served, path, port=port)
            assert (reply.status, reply.body) == (200, body)
        assert (await fetch(served, "/metrics", port=port)).status == 200
        assert (await fetch(served, "/", port=port)).status == 404  # the page is none


@pytest.mark.parametrize(
    "line", [b"HEAD /livez HTTP/9.9", b"GET /livez HTTP/9.9", b"HEAD /livez HTTP/1.1", b"HEAD / HTTP/0.1"]
)
async def test_every_request_line_gets_its_answer(line: bytes) -> None:
    async with serving(ServerConfig(port=0)) as served:
        stream = await served.tcp()
        await stream.send_all(line + b"\r\nHost: test\r\n\r\n")
        answer = b""
        while part := await stream.receive_some():
            answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == (b"200" if line.endswith(b"1.1") else b"505")
        assert body == (b"" if line.startswith(b"HEAD") else b"HTTP/1.1 is spoken here\n")
        refused = served.server.metrics.registry.get_sample_value
        assert refused("wsbatch_requests_refused_total", {"code": "internal_error"}) is None


async def test_readiness_tells_that_the_queue_is_full() -> None:
    engine = ScriptedEngine()
    engine.refuse = QueueFull("256 requests wait, the most allowed", retry_after_ms=1500)
    async with serving(ServerConfig(port=0), engine=engine) as served:
        reply = await fetch(served, "/readyz")
        assert (reply.status, reply.headers["retry-after"]) == (503, "2")
        assert json.loads(reply.body) == {
            "type": "error",
            "code": "queue_full",
            "status": 503,
            "message": "256 requests wait, the most allowed",
            "retry_after_ms": 1500,
        }
        assert (await fetch(served, "/livez")).status == 200


async def test_readiness_tells_that_all_connections_are_taken() -> None:
    async with serving(ServerConfig(port=0, max_connections=1)) as served:
        await served.client()
        reply = await fetch(served, "/readyz")
        assert reply.status == 503
        assert json.loads(reply.body)["code"] == "queue_full"


async def test_metrics_are_prometheus_text() -> None:
    async with serving(ServerConfig(port=0)) as served:
        await served.client()
        reply = await fetch(served, "/metrics")
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"\nwsbatch_connections 1.0\n" in reply.body


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/nothing"])
async def test_head_is_get_without_the_body(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_ticks(metrics: ServerMetrics) -> None:
        await trio.sleep_forever()

    # What the ticker counts between the two would make the second longer.
    monkeypatch.setattr(ServerMetrics, "watch_loop", no_ticks)
    async with serving(ServerConfig(port=0)) as served:
        get, head = await fetch(served, path), await fetch(served, path, "HEAD")
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-length"] == get.headers["content-length"] != "0"


async def test_other_methods_and_paths() -> None:
    async with serving(ServerConfig(port=0)) as served:
        reply = await fetch(served, "/metrics", "POST")
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
        for path in ("/nothing", "/favicon.ico", "/livez/", "//livez"):
            assert (await fetch(served, path)).status == 404


async def test_no_token_is_asked_of_probes() -> None:
    async with serving(ServerConfig(port=0, auth_token="s3cret")) as served:
        assert (await fetch(served, "/readyz")).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200,  # TLS where none is spoken
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET http://[oops/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\nHost: a\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost : a\r\n\r\n",
    ],
    ids=lambda request: repr(request[:30]),
)
async def test_what_is_not_http_is_refused(request_bytes: bytes) -> None:
    async with serving(ServerConfig(port=0)) as served:
        stream = await served.tcp()
        await stream.send_all(request_bytes)
        await stream.send_eof()
        answer = b""
        with trio.fail_after(10):
            while part := await stream.receive_some():
                answer += part
        assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 501 ", b"HTTP/1.1 505 ")
        assert (await fetch(served, "/livez")).status == 200
