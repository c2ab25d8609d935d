"""Configuration: frozen dataclasses, validated once. A bad value is a ValueError naming field, value and bound.

Each field carries its help text and bounds: the validator, the command line's flags and the table in
docs/operations.md are all made from them, so a setting is described in one place.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from wsbatch.auth import clean_origins, clean_token
from wsbatch.settings import Settings, setting

SchedulerName = Literal["dynamic", "continuous"]
WaitAnchor = Literal["oldest", "idle", "last"]


@dataclass(frozen=True)
class EngineConfig(Settings):
    """The model, how its requests are batched, and how many may wait."""

    model: str = setting(
        "demo",
        "model to serve: a Hugging Face id, a local directory, a .gguf file, `demo`, or "
        "`simulated[:tau_ms=…,alpha_ms=…,beta_ms=…]`, which computes nothing: its steps last tau + alpha for each "
        "decode row + beta for each prompt token",
    )
    dtype: str = setting(
        "auto", "number type that the model computes in", choices=("auto", "float32", "bfloat16", "float16")
    )
    device: str = setting("auto", "device that the model runs on", choices=("auto", "cpu", "cuda"))
    kernel_level: str = setting(
        "auto",
        "continuous, on a CPU: instruction set that the kernels use; auto: the fastest that the processor has",
        choices=("auto", "avx512_bf16", "avx512", "avx2", "neon", "generic"),
    )
    threads: int | None = setting(
        None, "CPU threads that the model uses; default: torch's own choice", least=1, most=1024
    )
    max_model_len: int | None = setting(
        None,
        "longest prompt plus output, in tokens; default: the context length in the model's files (LongRoPE: the "
        "original one)",
        least=2,
    )

    scheduler: SchedulerName = setting(
        "continuous",
        "how requests are batched: dynamic runs padded batches to completion, continuous lets rows join and leave at "
        "every step",
        choices=get_args(SchedulerName),
    )
    max_batch_size: int = setting(32, "most requests that are computed in one batch", least=1, most=4096)
    max_wait_ms: float = setting(
        5.0, "dynamic: longest time that a request is held back while the batch fills up", least=0, most=60_000
    )
    wait_anchor: WaitAnchor = setting(
        "oldest",
        "dynamic: from when max_wait_ms counts: the oldest request's arrival (oldest), the moment when the model fell "
        "idle (idle), or the last arrival (last: debounce_ms then ends the wait, max_wait_ms after the oldest at "
        "most)",
        choices=get_args(WaitAnchor),
    )
    debounce_ms: float = setting(
        2.0, "dynamic, with wait_anchor last: time without an arrival that ends the wait", least=0, most=60_000
    )
    length_buckets: tuple[int, ...] = setting(
        (),
        "dynamic: upper bounds of prompt length buckets, in tokens; only prompts of one bucket share a batch; "
        "default: one bucket",
        least=1,
    )
    adaptive_wait: bool = setting(
        False, "dynamic: stop waiting, before max_wait_ms, when arrivals are too rare to make it pay"
    )
    early_compaction: bool = setting(
        False, "dynamic: remove finished rows from a running batch once half of its rows have finished"
    )

    max_batch_prefill_tokens: int = setting(
        2048, "continuous: most prompt tokens that one step prefills while no row decodes", least=1
    )
    prefill_chunk_tokens: int = setting(
        128,
        "continuous: most prompt tokens that one step prefills while rows decode; bounds the time between their tokens",
        least=1,
    )
    max_batch_total_tokens: int = setting(32_768, "continuous: size of the KV cache, in tokens", least=256)
    block_tokens: int = setting(
        16,
        "continuous: tokens in one block of the KV cache; in half precision on CUDA rounded up to a multiple of 256, "
        "which torch's paged attention needs",
        least=1,
        most=4096,
    )
    prefix_cache: bool = setting(
        True, "continuous: compute equal beginnings of prompts once, and share their KV blocks"
    )

    max_queue_requests: int = setting(
        256, "most requests that wait in the queue; more are refused with queue_full", least=1
    )
    max_queue_tokens: int = setting(
        262_144, "most prompt tokens that wait in the queue; more are refused with queue_full", least=1
    )
    queue_timeout_ms: int = setting(
        60_000,
        "longest time that a request waits in the queue before it ends with queue_timeout",
        least=1,
        most=86_400_000,
    )
    max_unsent_tokens: int = setting(
        4096,
        "most tokens that a client may leave unread; more, for two seconds, end its request with slow_consumer",
        least=1,
    )
    ttft_slo_ms: float | None = setting(
        None,
        "goal for the time to first token: a request that is predicted to take longer is refused; default: no goal",
        least=1,
    )
    itl_slo_ms: float | None = setting(
        None,
        "goal for the time between two tokens: a request that would make decode steps longer is refused, and "
        "continuous batching sizes its prefill chunks by it; default: no goal",
        least=1,
    )
    step_stall_s: float = setting(
        120.0,
        "longest time that a model step may take before the engine counts as dead; prefill steps are sized to take a "
        "tenth of it",
        least=0.1,
        most=86_400,
    )

    def __post_init__(self) -> None:
        """Check every field, then what no single field shows."""
        super().__post_init__()
        if self.max_batch_prefill_tokens < self.prefill_chunk_tokens:
            raise ValueError(
                f"EngineConfig.max_batch_prefill_tokens is {self.max_batch_prefill_tokens}: must be at least "
                f"prefill_chunk_tokens {self.prefill_chunk_tokens}"
            )
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError(f"EngineConfig.length_buckets is {self.length_buckets!r}: must be strictly increasing")


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


@dataclass(frozen=True)
class PoolConfig(Settings):
    """How a router treats its replicas."""

    connections: int = setting(
        4,
        "connections to each replica that carry requests, many on each; one more carries the probes",
        least=1,
        most=64,
    )
    status_interval_ms: float = setting(
        100.0, "time between two questions to a replica about how much work it has", least=1
    )
    stall_s: float = setting(
        30.0,
        "longest time that a replica may be silent, or take for a step, before it counts as lost and its requests go "
        "elsewhere",
        least=0.05,
    )
    accept_timeout_s: float = setting(
        10.0,
        "longest time that a replica may take to accept or refuse a request before another one is asked",
        least=0.01,
    )
    request_stall_s: float = setting(
        120.0,
        "longest time that a replica may take for the next 32 tokens of a request, or stay silent about it, before "
        "another one goes on with it",
        least=0.05,
    )
    resume_timeout_s: float = setting(
        60.0, "longest time that a request whose replica was lost waits for another one to go on with it", least=0
    )
    first_replica_s: float = setting(60.0, "longest time that the start waits for the first replica", least=0.1)
    affinity_tokens: int = setting(
        2048,
        "how much busier than the least busy replica, in tokens still to generate, a replica that has the beginning of "
        "a prompt cached may be and get the request",
        least=0,
    )
    reconnect_max_s: float = setting(5.0, "longest pause between two attempts to reach a lost replica", least=0.01)
    max_unread_tokens: int = setting(
        4096,
        "most tokens that a client may leave unread; more, for two seconds, end its request with slow_consumer",
        least=1,
    )


@dataclass(frozen=True)
class FleetConfig(Settings):
    """Replicas that Ray runs: how many, with what, and when there should be more or fewer."""

    replicas: int = setting(1, "number of replicas at the start", least=1, most=10_000)
    replica_cpus: float = setting(1.0, "CPUs that Ray reserves for each replica", least=0)
    replica_gpus: float = setting(0.0, "GPUs that Ray reserves for each replica", least=0)
    min_replicas: int | None = setting(None, "autoscaling: fewest replicas; default: as many as at the start", least=1)
    max_replicas: int | None = setting(None, "autoscaling: most replicas; default: as many as at the start", least=1)
    scale_up_queue_ms: float = setting(
        500.0,
        "autoscaling: wait in the queue above which a replica is added, if it lasts for scale_up_after_s",
        least=1,
    )
    scale_up_after_s: float = setting(
        10.0, "autoscaling: how long the wait must be over scale_up_queue_ms before a replica is added", least=0
    )
    scale_down_after_s: float = setting(
        300.0, "autoscaling: how long nothing must have waited, with slots free, before a replica is removed", least=0
    )
    start_timeout_s: float = setting(600.0, "longest time that a replica may take to get ready", least=1)

    def __post_init__(self) -> None:
        """Check every field, then the bounds of autoscaling against each other."""
        super().__post_init__()
        least, most = self.min_replicas or self.replicas, self.max_replicas or self.replicas
        if not least <= self.replicas <= most:
            raise ValueError(f"FleetConfig.replicas is {self.replicas}: must be from {least} to {most}")
