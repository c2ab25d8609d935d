"""What a pool is told: how it reaches its replicas, when it gives one up, how long a request may wait for another."""

from dataclasses import dataclass

from wsbatch.config import Settings, setting


@dataclass(frozen=True)
class PoolConfig(Settings):
    """How a router treats its replicas."""

    connections: int = setting(4, "connections to each replica; requests are multiplexed on them", least=1, most=64)
    status_interval_ms: float = setting(100.0, "how often each replica is asked how much work it has", least=1)
    stall_s: float = setting(
        30.0, "a replica is taken out when a step of its lasts longer, or when it is silent for so long", least=0.05
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
        4096, "tokens a client may leave unread before its request is ended with slow_consumer", least=1
    )
