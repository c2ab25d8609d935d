"""How many replicas there should be: a pure function of what was seen, with hysteresis in height and in time."""

from dataclasses import dataclass, replace

from wsbatch.config import FleetConfig
from wsbatch.messages import Status

# A replica goes only where the others would then have at least this share of their slots to spare.
_SPARE = 0.3


@dataclass(frozen=True, slots=True)
class Memory:
    """Since when it has been so, in seconds; None where it is not so now."""

    long_since_s: float | None = None
    idle_since_s: float | None = None


def decide(config: FleetConfig, memory: Memory, status: Status, *, replicas: int, now_s: float) -> tuple[int, Memory]:
    """The number of replicas to have now, and what to remember.

    One more when requests have waited longer than `scale_up_queue_ms` without a pause for `scale_up_after_s`; one less
    when nothing has waited for `scale_down_after_s` and the others could take the load with slots to spare. After a
    change both clocks start anew, so that its effect is seen before the next one.

    Args:
        config: bounds and thresholds.
        memory: as the last call returned it.
        status: of the pool: the longest wait, the requests running, the slots of all replicas together.
        replicas: wanted now, whether or not all of them are ready.
        now_s: on any clock.
    """
    least, most = config.min_replicas or config.replicas, config.max_replicas or config.replicas
    if not least <= replicas <= most:
        return min(max(replicas, least), most), Memory()
    long = status.queue_ms > config.scale_up_queue_ms
    left = status.max_batch_size * (replicas - 1) / replicas
    idle = status.waiting == 0 and status.running <= left * (1 - _SPARE)
    memory = replace(
        memory,
        long_since_s=(now_s if memory.long_since_s is None else memory.long_since_s) if long else None,
        idle_since_s=(now_s if memory.idle_since_s is None else memory.idle_since_s) if idle else None,
    )
    if memory.long_since_s is not None and now_s - memory.long_since_s >= config.scale_up_after_s and replicas < most:
        return replicas + 1, Memory()
    if (
        memory.idle_since_s is not None
        and now_s - memory.idle_since_s >= config.scale_down_after_s
        and replicas > least
    ):
        return replicas - 1, Memory()
    return replicas, memory
