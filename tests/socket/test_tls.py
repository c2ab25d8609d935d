"""TLS by certfile and keyfile."""

import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from wsbatch.config import ServerConfig
from wsbatch.messages import Accepted, DrainingNotice, Finished, GenerateRequest, Hello, SamplingParams
from wsbatch.server.serve import serve
from wsbatch.testing import BareClient, Closed, ScriptedEngine, serving

AUTHORITY = trustme.CA()
TRUST = ssl.create_default_context()
AUTHORITY.configure_trust(TRUST)

PATIENCE_S = 60  # for what must happen, never waited out in a run that passes
LONG_S = 3600.0  # of a server's timeout that must not be what makes it happen


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    certificate = AUTHORITY.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(str(tmp_path / "cert.pem"), append=True)
    return {"certfile": str(tmp_path / "cert.pem"), "keyfile": str(tmp_path / "key.pem")}


async def test_tokens_stream_over_tls(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, **files), interval_s=0.001) as served:
        assert served.server.url == f"wss://127.0.0.1:{served.server.port}"
        client = BareClient(await served.tls(TRUST))
        await client.open()
        assert isinstance(await client.receive(), Hello)
        await client.send(GenerateRequest(id=1, prompt="x", sampling=SamplingParams(max_tokens=20)))
        frame: Any = await client.receive()
        assert isinstance(frame, Accepted)
        while not isinstance(frame, Finished):
            frame = await client.receive()
        assert frame.usage.completion_tokens == 20


async def test_probes_answer_over_tls(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, **files), interval_s=0.001) as served:
        stream = await served.tls(TRUST)
        await stream.send_all(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while part := await stream.receive_some():
            answer += part
        assert answer.endswith(b"\r\n\r\nready\n")


async def test_a_client_that_speaks_no_tls_ends_itself_only(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, head_timeout_s=LONG_S, **files), interval_s=0.001) as served:
        for nonsense in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 50, b""):
            stream = await served.tcp()
            await stream.send_all(nonsense)
            await stream.send_eof()
            with trio.fail_after(PATIENCE_S):
                try:
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
        await BareClient(await served.tls(TRUST)).open()


async def test_a_handshake_that_stalls_is_dropped(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, head_timeout_s=0.2, **files), interval_s=0.001) as served:
        stream = await served.tcp()
        with trio.fail_after(PATIENCE_S):
            assert await stream.receive_some() == b""


async def test_a_client_that_stops_reading_is_aborted(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, send_timeout_s=0.3, **files), interval_s=0.001) as served:
        client = BareClient(await served.tls(TRUST))
        await client.open()
        await client.send(GenerateRequest(id=1, prompt="x", sampling=SamplingParams(max_tokens=1_000_000)))
        with trio.fail_after(PATIENCE_S):
            await served.engine.wait_live(1)
            stream = served.engine.live[0]
            while stream.live:
                stream.push([1], "x" * 100_000, [])
                await trio.sleep(0.001)
            await served.engine.wait_live(0)


async def test_a_reset_leaves_nothing_behind(files: dict[str, str]) -> None:
    config = ServerConfig(port=0, ping_interval_s=LONG_S, send_timeout_s=LONG_S, **files)
    async with serving(config, interval_s=0.001) as served:
        stream = await served.tls(TRUST)
        client = BareClient(stream)
        await client.open()
        await client.send(GenerateRequest(id=1, prompt="x", sampling=SamplingParams(max_tokens=1_000_000)))
        await served.engine.wait_live(1)
        await trio.aclose_forcefully(stream)
        with trio.fail_after(PATIENCE_S):
            await served.engine.wait_live(0)


async def test_draining_closes_with_1001(files: dict[str, str]) -> None:
    async with serving(ServerConfig(port=0, **files), interval_s=0.001) as served:
        client = BareClient(await served.tls(TRUST))
        await client.open()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.server.drain)
            assert isinstance(await client.receive(), Hello)
            assert isinstance(await client.receive(), DrainingNotice)
            with pytest.raises(Closed) as closed:
                await client.receive()
            assert closed.value.code == 1001
            await client.close()


async def test_a_certificate_that_cannot_be_loaded_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for certfile in (str(tmp_path / "missing.pem"), str(empty)):
        with pytest.raises(ValueError, match=r"certfile.*keyfile.*cannot be loaded"):
            await serve(ScriptedEngine(), ServerConfig(port=0, certfile=certfile, keyfile=files["keyfile"]))
