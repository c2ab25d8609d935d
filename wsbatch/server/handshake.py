"""The opening handshake of a WebSocket: is it valid, and may this client come in?"""

import base64
import binascii
import hmac
from dataclasses import dataclass
from urllib.parse import parse_qs

from wsproto.utilities import generate_accept_token

from wsbatch.auth import clean_origin
from wsbatch.config import ServerConfig
from wsbatch.errors import Unauthorized
from wsbatch.server.http import Head, HttpError
from wsbatch.wire import SUBPROTOCOLS

# RFC 1035 allows 253 bytes of name; a port and brackets come on top.
_MAX_HOST_BYTES = 300


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A handshake that was accepted: the subprotocol agreed on (None where none was offered), the answer's headers."""

    subprotocol: str | None
    headers: tuple[tuple[str, str], ...]


def accept_upgrade(head: Head, config: ServerConfig) -> Upgrade:
    """Raises HttpError (400, 403, 405, 426) and Unauthorized."""
    key = _valid_key(head)
    _check_token(head, config.auth_token)
    _check_origin(head, config.allow_origins)
    subprotocol = _agree(head)
    headers = [
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", generate_accept_token(key).decode()),
    ]
    if subprotocol is not None:
        headers.append(("Sec-WebSocket-Protocol", subprotocol))
    return Upgrade(subprotocol, tuple(headers))


def probe_refusal(head: Head, config: ServerConfig) -> Unauthorized | None:
    """For a page whose handshake failed: whether it was for the token in the query; browsers do not tell it.

    A probe without a token, an orchestrator's, is never refused.
    """
    if "token" in parse_qs(head.query, keep_blank_values=True):
        try:
            _check_token(head, config.auth_token)
        except Unauthorized as error:
            return error
    return None


def readable_by(head: Head, config: ServerConfig) -> tuple[tuple[str, str], ...]:
    """Headers that let the pages that may connect read a probe's answer, wherever they were loaded from."""
    if not config.allow_origins:
        return (("Access-Control-Allow-Origin", "*"),)
    try:
        _check_origin(head, config.allow_origins)
    except HttpError:
        return ()
    origins = tuple(("Access-Control-Allow-Origin", value.decode("latin-1")) for value in head.values(b"origin"))
    return (*origins[:1], ("Vary", "Origin"))


def _valid_key(head: Head) -> bytes:
    """The handshake's key, once all of RFC 6455 section 4.2.1 holds.

    `Host`, `Connection` and `Sec-WebSocket-*` must be ASCII and `Host` a name that IDNA can decode.
    """
    for name, value in head.headers:
        if name in (b"host", b"connection", b"upgrade") or name.startswith(b"sec-websocket-"):
            _ascii(name, value)
    _check_host(head.values(b"host"))
    if head.method != b"GET":
        raise HttpError(405, "a WebSocket handshake is a GET", headers=(("Allow", "GET"),))
    if head.http_version < b"1.1":
        raise HttpError(400, "a WebSocket handshake needs HTTP/1.1")
    if [token.lower() for token in _tokens(head, b"upgrade")] != ["websocket"]:
        raise HttpError(400, "Upgrade must be websocket")
    if "upgrade" not in [token.lower() for token in _tokens(head, b"connection")]:
        raise HttpError(400, "Connection must name Upgrade")
    if head.values(b"sec-websocket-version") != [b"13"]:
        raise HttpError(426, "Sec-WebSocket-Version must be 13", headers=(("Sec-WebSocket-Version", "13"),))
    keys = head.values(b"sec-websocket-key")
    if len(keys) != 1 or not _is_key(keys[0]):
        raise HttpError(400, "Sec-WebSocket-Key must be one base64 value of 16 bytes")
    return keys[0]


def _check_token(head: Head, wanted: str | None) -> None:
    if wanted is not None and not hmac.compare_digest(_offered_token(head), wanted.encode()):
        raise Unauthorized("this server wants its auth token: `Authorization: Bearer …`, or `?token=…`")


def _offered_token(head: Head) -> bytes:
    """The token in `Authorization: Bearer`, else in the query (browsers cannot set headers); empty without one."""
    for value in head.values(b"authorization"):
        scheme, _, credentials = value.partition(b" ")
        if scheme.lower() == b"bearer":
            return credentials.strip()
    return parse_qs(head.query).get("token", [""])[0].encode()


def _check_origin(head: Head, allowed: tuple[str, ...]) -> None:
    for value in head.values(b"origin") if allowed else ():
        try:
            origin = clean_origin(value.decode("ascii"))
        except ValueError:  # UnicodeDecodeError is one
            origin = None
        if origin not in allowed:
            raise HttpError(403, "pages of this origin are not let in")


def _agree(head: Head) -> str | None:
    """The first subprotocol offered that is spoken here."""
    offered = _tokens(head, b"sec-websocket-protocol")
    for subprotocol in offered:
        if subprotocol in SUBPROTOCOLS:
            return subprotocol
    if offered:
        raise HttpError(400, f"no subprotocol offered is spoken here: {', '.join(SUBPROTOCOLS)}")
    return None


def _tokens(head: Head, name: bytes) -> list[str]:
    """The comma-separated members of this header over all its lines."""
    return [item.strip() for value in head.values(name) for item in _ascii(name, value).split(",") if item.strip()]


def _ascii(name: bytes, value: bytes) -> str:
    try:
        return value.decode("ascii")
    except UnicodeDecodeError:
        raise HttpError(400, f"header {name.decode('latin-1')} must be ASCII") from None


def _check_host(hosts: list[bytes]) -> None:
    if len(hosts) != 1 or len(hosts[0]) > _MAX_HOST_BYTES:
        raise HttpError(400, f"header host must be given once, in at most {_MAX_HOST_BYTES} bytes")
    try:
        hosts[0].decode("idna")
    except UnicodeError:
        raise HttpError(400, "header host is not a valid name") from None


def _is_key(value: bytes) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == 16
    except binascii.Error:
        return False
