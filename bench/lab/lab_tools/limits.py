"""The limit that memory bandwidth and multiplication rate set to a run: measured here, not taken from a data sheet."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wsbatch_bench.steps.bare_loop import LoopRun

_TRIES = 7


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this machine does at best. Bytes read a second from memory; floating-point operations a second in GEMM."""

    read_bytes_per_s: float
    gemm_flops_per_s: float


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a step must at least read and compute.

    Attributes:
        linear_params: weights of all linear layers but the head, each read once a step.
        head_params: weights of the head, used for rows that sample.
        weight_bytes: of one weight.
        kv_bytes_per_token: keys and values of one token in all layers.
    """

    linear_params: int
    head_params: int
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, module: Any) -> "ModelSizes":
        """From a transformers causal language model."""
        import torch

        head = module.get_output_embeddings()
        linears = sum(
            layer.weight.numel()
            for layer in module.modules()
            if isinstance(layer, torch.nn.Linear) and layer is not head
        )
        config = module.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = head.weight.element_size()
        kv = config.num_hidden_layers * 2 * heads * head_dim * size
        return cls(linears, head.weight.numel(), size, kv)


def measure_machine(dtype: str) -> MachineRates:
    """Read a quarter of a gigabyte, and multiply matrices in the model's type; each at its best of a few tries."""
    import torch

    block = torch.ones(1 << 26)
    read_s = _best(lambda: block.sum())
    kind = getattr(torch, dtype)
    n = 2048
    left, right = torch.ones(n, n, dtype=kind), torch.ones(n, n, dtype=kind)
    gemm_s = _best(lambda: left @ right)
    return MachineRates(block.numel() * block.element_size() / read_s, 2 * n**3 / gemm_s)


def limit_s(run: LoopRun, sizes: ModelSizes, rates: MachineRates) -> float:
    """The least time that the steps of this run can take: each reads the weights or computes, whichever is longer,
    and reads the cache of its rows."""
    total_s = 0.0
    for step in run.steps:
        tokens = step.cost.prefill_tokens + step.cost.decode_slots
        body_s = max(
            sizes.linear_params * sizes.weight_bytes / rates.read_bytes_per_s,
            2 * sizes.linear_params * tokens / rates.gemm_flops_per_s,
        )
        head_s = max(
            sizes.head_params * sizes.weight_bytes / rates.read_bytes_per_s,
            2 * sizes.head_params * step.samples / rates.gemm_flops_per_s,
        )
        cache_s = step.kv_tokens * sizes.kv_bytes_per_token / rates.read_bytes_per_s
        total_s += body_s + (head_s if step.samples else 0.0) + cache_s
    return total_s


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest try, after one to warm up."""
    work()
    times = []
    for _ in range(_TRIES):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return min(times)
