"""Where a server says it can be reached from this machine."""

import pytest

from wsbatch.config import ServerConfig
from wsbatch.server.serve import Server
from wsbatch.testing import ScriptedEngine


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("127.0.0.1", 8765), "ws://127.0.0.1:8765"),
        (("0.0.0.0", 80), "ws://127.0.0.1:80"),
        (("::", 8765), "ws://[::1]:8765"),
        (("fe80::1%eth0", 8765), "ws://[fe80::1%eth0]:8765"),
    ],
)
async def test_url(address: tuple[str, int], url: str) -> None:
    server = Server(ScriptedEngine(), ServerConfig(), addresses=[address, ("192.0.2.1", 1)])
    assert server.url == url
    assert server.port == address[1]
