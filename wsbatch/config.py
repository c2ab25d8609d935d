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
        "Hugging Face id, local directory, .gguf file, `demo`, or `simulated[:tau_ms=…,alpha_ms=…,beta_ms=…]`: none, "
        "steps that take tau + alpha a decode row + beta a prompt token",
    )
    dtype: str = setting("auto", "type of the computation", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    kernel_level: str = setting(
        "auto",
        "continuous, on a CPU: the instructions that the kernels use; auto: the fastest that the processor has",
        choices=("auto", "avx512_bf16", "avx512", "avx2", "neon", "generic"),
    )
    threads: int | None = setting(None, "threads of the model; default: torch's own choice", least=1, most=1024)
    max_model_len: int | None = setting(
        None,
        "longest prompt plus output, in tokens; default: what the model was made for (LongRoPE: its original length)",
        least=2,
    )

    scheduler: SchedulerName = setting(
        "continuous",
        "dynamic: padded batches run to completion; continuous: rows join and leave at every step",
        choices=get_args(SchedulerName),
    )
    max_batch_size: int = setting(32, "rows in a batch at most", least=1, most=4096)
    max_wait_ms: float = setting(
        5.0, "dynamic: how long the oldest waiting request may be held for company", least=0, most=60_000
    )
    wait_anchor: WaitAnchor = setting(
        "oldest",
        "dynamic: where the wait's clock starts: the oldest request's arrival, the moment the model fell idle, "
        "or the last arrival (bounded by max_wait_ms from the oldest)",
        choices=get_args(WaitAnchor),
    )
    debounce_ms: float = setting(2.0, "dynamic, anchor `last`: the lull that ends the wait", least=0, most=60_000)
    length_buckets: tuple[int, ...] = setting(
        (), "dynamic: prompt lengths that part the batches: rows of one batch share a bucket", least=1
    )
    adaptive_wait: bool = setting(False, "dynamic: wait only while the arrival rate makes it pay, up to max_wait_ms")
    early_compaction: bool = setting(
        False, "dynamic: drop finished rows from the batch's tensors once half of them are done"
    )

    max_batch_prefill_tokens: int = setting(
        2048, "continuous: prompt tokens in a step at most while nothing decodes", least=1
    )
    prefill_chunk_tokens: int = setting(
        128, "continuous: prompt tokens in a step at most while rows decode: bounds the gap between tokens", least=1
    )
    max_batch_total_tokens: int = setting(32_768, "continuous: tokens held in the KV pool at most", least=256)
    block_tokens: int = setting(
        16,
        "continuous: tokens in a KV block; in half precision on CUDA rounded up to a multiple of 256, which torch's "
        "paged attention needs",
        least=1,
        most=4096,
    )
    prefix_cache: bool = setting(True, "continuous: share the KV blocks of equal prompt beginnings")

    max_queue_requests: int = setting(256, "requests waiting at most", least=1)
    max_queue_tokens: int = setting(262_144, "prompt tokens waiting at most", least=1)
    queue_timeout_ms: int = setting(60_000, "a request's longest time in the queue", least=1, most=86_400_000)
    max_unsent_tokens: int = setting(
        4096, "tokens a client may leave unread for two seconds before its request ends with slow_consumer", least=1
    )
    ttft_slo_ms: float | None = setting(
        None, "refuse a request whose predicted time to first token is over this; default: never", least=1
    )
    itl_slo_ms: float | None = setting(
        None,
        "goal for the time between two tokens: refuse a request that would make a decode step longer; continuous: "
        "choose the prefill chunk by it, from the measured step costs; default: no goal",
        least=1,
    )
    step_stall_s: float = setting(
        120.0,
        "a model step longer than this declares the engine dead; steps with prompts are sized to take a tenth of it",
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
        "address to listen on, or several separated by commas; `::` is every IPv4 address too",
        several=True,
    )
    port: int = setting(8765, "port to listen on; 0 picks a free one", least=0, most=65_535)
    probe_port: int | None = setting(
        None,
        "one more port, of the probes and /metrics alone, in the clear: with room of its own, whoever fills the other; "
        "0 picks a free one",
        least=0,
        most=65_535,
    )
    certfile: str | None = setting(None, "TLS certificate chain (PEM); needs keyfile")
    keyfile: str | None = setting(None, "TLS private key (PEM); needs certfile")
    auth_token: str | None = setting(
        None,
        "clients must send it: `Authorization: Bearer …` or `?token=…`; white space around it does not count",
        secret=True,
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        "origins of the pages let in, as https://host or https://host:port; none given, or `*`: any page may connect; "
        "requests without Origin always pass",
    )
    allow_watch: bool = setting(
        False, "let clients watch the batch: which slot is busy with what, the queue's depth; no text of anybody's"
    )
    max_connections: int = setting(1024, "open connections at most; more get 503 before the upgrade", least=1)
    max_live_requests: int = setting(64, "live requests on one connection at most", least=1)
    max_message_bytes: int = setting(8_388_608, "a client's message at most", least=1024, most=1_073_741_824)
    max_input_bytes: int = setting(
        67_108_864,
        "messages over 16 KiB that arrive, or become requests, of all clients together at most; more wait to be read",
        least=1024,
    )
    message_timeout_s: float = setting(
        60.0, "a message over 16 KiB must be complete within this", least=0.01, most=3600
    )
    max_head_bytes: int = setting(16_384, "an HTTP request head at most", least=1024, most=1_048_576)
    head_timeout_s: float = setting(10.0, "a request head must be complete within this", least=0.01, most=3600)
    ping_interval_s: float = setting(20.0, "silence after which the client is pinged", least=0.01, most=3600)
    ping_timeout_s: float = setting(20.0, "silence after a ping that ends the connection", least=0.01, most=3600)
    frame_interval_ms: float = setting(
        5.0, "tokens that come within this after a connection's last frame are merged into its next", least=0, most=1000
    )
    send_timeout_s: float = setting(30.0, "one frame must be written within this", least=0.01, most=3600)
    close_timeout_s: float = setting(3.0, "the closing handshake must be done within this", least=0.01, most=60)
    drain_s: float = setting(
        30.0,
        "grace period of a shutdown, in which it is over; its end (close_timeout_s, and half a second) is for goodbyes",
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
        "connections to each replica for requests, which are multiplexed on them; one more is for probes",
        least=1,
        most=64,
    )
    status_interval_ms: float = setting(100.0, "how often each replica is asked how much work it has", least=1)
    stall_s: float = setting(
        30.0, "a replica is taken out when a step of its lasts longer, or when it is silent for so long", least=0.05
    )
    accept_timeout_s: float = setting(
        10.0, "a replica must accept or refuse a request within this, or another one is asked", least=0.01
    )
    request_stall_s: float = setting(
        120.0,
        "a request of which its replica says nothing for so long, or gives fewer than 32 tokens in that time, goes on "
        "elsewhere",
        least=0.05,
    )
    resume_timeout_s: float = setting(
        60.0, "how long a request whose replica was lost may wait for another one to go on with it", least=0
    )
    first_replica_s: float = setting(60.0, "the first replica must be there within this", least=0.1)
    affinity_tokens: int = setting(
        2048,
        "a prompt goes to the replica that computed its beginning before, unless that one has so many tokens more to "
        "generate than the least busy one",
        least=0,
    )
    reconnect_max_s: float = setting(5.0, "pause between two attempts to reach a lost replica, at most", least=0.01)
    max_unread_tokens: int = setting(
        4096, "tokens a client may leave unread for two seconds before its request ends with slow_consumer", least=1
    )


@dataclass(frozen=True)
class FleetConfig(Settings):
    """Replicas that Ray runs: how many, with what, and when there should be more or fewer."""

    replicas: int = setting(1, "replicas to begin with", least=1, most=10_000)
    replica_cpus: float = setting(1.0, "CPUs that Ray reserves for each replica", least=0)
    replica_gpus: float = setting(0.0, "GPUs that Ray reserves for each replica", least=0)
    min_replicas: int | None = setting(None, "autoscaling: replicas at least; default: as many as at first", least=1)
    max_replicas: int | None = setting(None, "autoscaling: replicas at most; default: as many as at first", least=1)
    scale_up_queue_ms: float = setting(500.0, "autoscaling: a wait in the queue that is too long, if it lasts", least=1)
    scale_up_after_s: float = setting(10.0, "autoscaling: how long it must last for one replica more", least=0)
    scale_down_after_s: float = setting(
        300.0, "autoscaling: how long nothing must wait, and slots be free, for one replica less", least=0
    )
    start_timeout_s: float = setting(600.0, "a replica must be ready within this", least=1)

    def __post_init__(self) -> None:
        """Check every field, then the bounds of autoscaling against each other."""
        super().__post_init__()
        least, most = self.min_replicas or self.replicas, self.max_replicas or self.replicas
        if not least <= self.replicas <= most:
            raise ValueError(f"FleetConfig.replicas is {self.replicas}: must be from {least} to {most}")
