"""Listening, and accepting connections also where this process may open no more files."""

import errno
import logging
import ssl
from collections.abc import Sequence
from ipaddress import ip_address

import trio

from wsbatch.server.pending import PendingConnections
from wsbatch.server.tcp import RawStream

LOG = logging.getLogger("wsbatch.transport")

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_PAUSE_S = 0.1
_LOG_S = 1.0


async def open_listeners(wanted: Sequence[str], port: int) -> list[trio.SocketListener]:
    """Bind the port at every host: for port 0 the one that the first is given. Raises OSError, whose `filename` is the
    address that cannot be bound."""
    hosts = list(wanted)
    if "::" in hosts and "0.0.0.0" not in hosts:  # trio binds it to IPv6 alone
        hosts.append("0.0.0.0")
    listeners: list[trio.SocketListener] = []
    try:
        for host in hosts:
            port = listeners[0].socket.getsockname()[1] if listeners else port
            try:
                listeners += await trio.open_tcp_listeners(port, host=host)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT and host not in wanted:
                    continue
                error.filename = f"{host}:{port}"
                raise
    except BaseException:
        for listener in listeners:
            listener.socket.close()
        raise
    return listeners


def addresses_of(listeners: Sequence[trio.SocketListener]) -> list[tuple[str, int]]:
    """(host, port) of each."""
    return [listener.socket.getsockname()[:2] for listener in listeners]


def local_host(host: str) -> str:
    """How a client on this machine writes an address that is listened on, in a URL."""
    address = ip_address(host)
    if address.is_unspecified:
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"[{address}]" if address.version == 6 else str(address)


def tls_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """Of a server with this certificate. Raises ValueError where it cannot be loaded."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(
            f"ServerConfig.certfile {certfile!r} with keyfile {keyfile!r} cannot be loaded: {error}"
        ) from error
    return context


class AcceptingListener(trio.abc.Listener[RawStream]):
    """A listener whose `accept` makes room where there is none, and says so once a second at most.

    Args:
        listener: accepts.
        pending: of whom the oldest gives way.
    """

    def __init__(self, listener: trio.abc.Listener[RawStream], pending: PendingConnections) -> None:
        self._listener = listener
        self._pending = pending
        self._failures = 0  # since they were last logged
        self._logged_s = -_LOG_S

    async def accept(self) -> RawStream:
        """Wait for a connection."""
        while True:
            try:
                return await self._listener.accept()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._note(error)
                self._pending.make_room()
                await trio.sleep(_PAUSE_S)

    async def aclose(self) -> None:
        """See `trio.abc.AsyncResource`."""
        await self._listener.aclose()

    def _note(self, error: OSError) -> None:
        self._failures += 1
        if trio.current_time() >= self._logged_s + _LOG_S:
            LOG.error("cannot accept a connection, %d times: %s", self._failures, error.strerror or error)
            self._failures, self._logged_s = 0, trio.current_time()
