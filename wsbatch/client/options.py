"""How to connect: the one list of options, and what `connect` takes by keyword."""

import random
import ssl
from dataclasses import dataclass, field
from typing import TypedDict

from wsbatch.auth import clean_token
from wsbatch.client.request import GenerateParams
from wsbatch.client.stream import Jitter
from wsbatch.wire import CODECS, MSGPACK


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectOptions:
    """Options of a connection. Raises ValueError for a bad one.

    Attributes:
        auth_token: sent as `Authorization: Bearer`, without the white space around it.
        ssl_context: for wss; None trusts the system's authorities.
        subprotocol: `wsbatch.v1.msgpack` or `wsbatch.v1.json`.
        connect_timeout_s: for everything up to the hello, on each try.
        keepalive_s: silence after which the server is pinged, and again after which it is given up; None never does.
        close_timeout_s: bound on leaving the block.
        jitter: uniform in [0, 1); spreads the retries of many clients.
    """

    auth_token: str | None = field(default=None, repr=False)
    ssl_context: ssl.SSLContext | None = None
    subprotocol: str = MSGPACK.subprotocol
    connect_timeout_s: float = 10.0
    keepalive_s: float | None = 20.0
    close_timeout_s: float = 2.0
    jitter: Jitter = random.random

    def __post_init__(self) -> None:
        if self.subprotocol not in CODECS:
            raise ValueError(f"subprotocol must be one of {', '.join(CODECS)}, got {self.subprotocol!r}")
        if self.auth_token is not None:
            token = clean_token(self.auth_token, name="auth_token")
            if not token.isascii():
                raise ValueError("auth_token must be printable ASCII")
            object.__setattr__(self, "auth_token", token)


class ConnectParams(TypedDict, total=False):
    """Keyword arguments of `connect`: the fields of `ConnectOptions`, with their defaults."""

    auth_token: str | None
    ssl_context: ssl.SSLContext | None
    subprotocol: str
    connect_timeout_s: float
    keepalive_s: float | None
    close_timeout_s: float
    jitter: Jitter


class ScriptParams(ConnectParams, GenerateParams, total=False):
    """Keyword arguments of `wsbatch.client.generate`, which connects first."""
