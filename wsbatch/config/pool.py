"""A pool's settings: how it treats its replicas, and how many of them Ray runs."""

from dataclasses import dataclass

from wsbatch.config.fields import Settings, setting


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
