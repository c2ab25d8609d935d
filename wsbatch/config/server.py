"""The server's settings: its sockets, who may use them, and what one client may take."""

from dataclasses import dataclass

from wsbatch.auth import clean_origins, clean_token
from wsbatch.config.fields import Settings, setting


@dataclass(frozen=True)
class ServerConfig(Settings):
    """The socket, who may use it, and what one client may take."""

    host: str = setting(
        "127.0.0.1",
        "address to listen on, or several, separated by commas; `::` means every address, IPv4 too",
        several=True,
    )
    port: int = setting(8765, "port to listen on; 0 picks a free one", least=0, most=65_535)
    probe_port: int | None = setting(
        None,
        "one more port, without TLS, that answers only the probes and /metrics, also while the other one is full; 0 "
        "picks a free one; default: none",
        least=0,
        most=65_535,
    )
    certfile: str | None = setting(None, "file of the TLS certificate chain (PEM); needs keyfile")
    keyfile: str | None = setting(None, "file of the TLS private key (PEM); needs certfile")
    auth_token: str | None = setting(
        None,
        "token that clients must send, as `Authorization: Bearer …` or `?token=…`; white space around it is ignored; "
        "default: none is asked for",
        secret=True,
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        "origins whose web pages may connect, as https://host or https://host:port; default, and `*`: any; requests "
        "without an Origin header always may",
    )
    allow_watch: bool = setting(
        False, "let clients watch the live batch: its slots and the length of the queue, never anybody's text"
    )
    max_connections: int = setting(1024, "most open WebSocket connections; more are refused with 503", least=1)
    max_live_requests: int = setting(64, "most live requests on one connection; more are refused with quota", least=1)
    max_message_bytes: int = setting(
        8_388_608,
        "largest message that a client may send; a larger one closes its connection with 1009",
        least=1024,
        most=1_073_741_824,
    )
    max_input_bytes: int = setting(
        67_108_864,
        "most memory for messages over 16 KiB that have not become requests yet, of all clients together; further "
        "ones are not read until there is room",
        least=1024,
    )
    message_timeout_s: float = setting(
        60.0, "longest time that a message over 16 KiB may take to arrive", least=0.01, most=3600
    )
    max_head_bytes: int = setting(
        16_384, "largest HTTP request head; a larger one gets 431", least=1024, most=1_048_576
    )
    head_timeout_s: float = setting(
        10.0,
        "longest time that an HTTP request head, and the TLS handshake before it, may take to arrive",
        least=0.01,
        most=3600,
    )
    ping_interval_s: float = setting(20.0, "how long a client may be silent before it is pinged", least=0.01, most=3600)
    ping_timeout_s: float = setting(
        20.0, "how long a pinged client may stay silent before its connection is closed", least=0.01, most=3600
    )
    frame_interval_ms: float = setting(
        5.0,
        "shortest time between two frames of tokens on one connection; tokens that come in between are merged",
        least=0,
        most=1000,
    )
    send_timeout_s: float = setting(
        30.0,
        "longest time that a client may take to receive one frame before its connection is closed",
        least=0.01,
        most=3600,
    )
    close_timeout_s: float = setting(
        3.0, "longest time that a client may take to answer a close frame", least=0.01, most=60
    )
    drain_s: float = setting(
        30.0,
        "longest time that a shutdown takes; live requests may finish until close_timeout_s and half a second before "
        "its end",
        least=0,
        most=86_400,
    )

    def __post_init__(self) -> None:
        """Check every field, then what no single field shows."""
        super().__post_init__()
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("ServerConfig.certfile and ServerConfig.keyfile must be given together")
        if self.max_input_bytes < self.max_message_bytes:
            raise ValueError(
                f"ServerConfig.max_input_bytes is {self.max_input_bytes}: must be at least max_message_bytes "
                f"{self.max_message_bytes}"
            )
        try:
            origins = clean_origins(self.allow_origins)
        except ValueError as error:
            raise ValueError(f"ServerConfig.allow_origins: {error}") from error
        object.__setattr__(self, "allow_origins", origins)
        if self.auth_token is not None:
            token = clean_token(self.auth_token, name="ServerConfig.auth_token")
            object.__setattr__(self, "auth_token", token)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses in `host`, each as the system takes it."""
        return tuple(host.strip().removeprefix("[").removesuffix("]") for host in self.host.split(","))
