"""Whose connection it is, as far as the network tells."""

from ipaddress import IPv4Address, IPv6Network, ip_address

import trio

_PREFIX = 64


def peer_of(stream: object) -> str | None:
    """The address that a TCP stream comes from; None for another stream, and where the connection has ended.

    Of IPv6 it is the network of 64 bits: that is what one subscriber is given, with as many addresses as it likes.
    """
    if not isinstance(stream, trio.SocketStream):
        return None
    try:
        name = stream.socket.getpeername()
        address = ip_address(name[0].partition("%")[0])
    except (OSError, ValueError, IndexError):
        return None
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or IPv6Network((address, _PREFIX), strict=False))
