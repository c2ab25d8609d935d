"""Times of single steps of a paged model, and what the device could do at best."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from lab_tools.limits import MachineRates
from wsbatch.messages import SamplingParams
from wsbatch.model.paged import PagedModel
from wsbatch.steps import PagedRow, PagedStep

_WARM_UP = 3
_GREEDY = SamplingParams()


def device_rates(device: str, dtype: torch.dtype, *, quick: bool) -> MachineRates:
    """Bytes a second that a copy moves (read and written), and operations a second of a matrix product."""
    block = torch.empty(1 << (22 if quick else 29), dtype=torch.float32, device=device)
    target = torch.empty_like(block)
    copy_s = _best_s(lambda: target.copy_(block), device)
    n = 256 if quick else 8192
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    gemm_s = _best_s(lambda: left @ right, device)
    return MachineRates(2 * block.numel() * block.element_size() / copy_s, 2 * n**3 / gemm_s)


def decode_s(model: PagedModel, *, rows: int, context: int, block_tokens: int, steps: int) -> float:
    """Median seconds of a decode step of `rows` rows whose context is `context` tokens at the first one.

    What the blocks hold does not matter to the time; they are read as they are.
    """
    width = -(-(context + _WARM_UP + steps) // block_tokens)
    tables = [tuple(range(row * width, (row + 1) * width)) for row in range(rows)]
    ids: Sequence[int] = [row % 97 for row in range(rows)]
    times = []
    for step in range(_WARM_UP + steps):
        plan = PagedStep(
            tuple(
                PagedRow(key, (token,), context + step, table, _GREEDY)
                for key, (token, table) in enumerate(zip(ids, tables, strict=True))
            )
        )
        begin_s = time.perf_counter()
        ids = model.run(plan).token_ids  # on the host: the device is done
        times.append(time.perf_counter() - begin_s)
    return median(times[_WARM_UP:])


def prefill_s(model: PagedModel, *, tokens: int, chunk: int, block_tokens: int, tries: int) -> float:
    """Seconds to prefill one prompt of `tokens` in chunks, alone; the best of a few tries after one to warm up."""
    table = tuple(range(-(-tokens // block_tokens)))
    prompt = tuple(token % 97 for token in range(tokens))
    steps = []
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        steps.append(PagedStep((PagedRow(0, prompt[start:end], start, table, _GREEDY if end == tokens else None),)))

    def prefill() -> None:
        for step in steps:
            model.run(step)

    return _best_s(prefill, model.info.device, tries=tries)


def _best_s(work: Callable[[], Any], device: str, *, tries: int = 7) -> float:
    times = []
    for _ in range(1 + tries):
        begin_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin_s)
    return min(times[1:])
