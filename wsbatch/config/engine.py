"""The engine's settings: its model, its batching, its queue."""

from dataclasses import dataclass
from typing import Literal, get_args

from wsbatch.config.fields import Settings, setting

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
        "auto",
        "number type of the weights; auto: bfloat16 where the processor or the kernels are faster with it, "
        "else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
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
