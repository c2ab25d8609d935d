"""The stages of the check. Each runs in a process of its own and reports rows as it goes, so that what it has measured
remains when it fails, hangs, or takes the device's context down with it."""

import importlib.metadata
import importlib.util
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from lab_tools.gpu.checks import agreement, alone, together
from lab_tools.gpu.choice import Choice
from lab_tools.gpu.timing import decode_s, device_rates, prefill_s
from lab_tools.limits import ModelSizes
from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch.model.processes import module_command
from wsbatch_bench.load.trace import draw_trace
from wsbatch_bench.steps.bare_loop import LoopRequest, run_loop

Report = Callable[[dict[str, Any]], None]
CONTEXT = 300
_POOL_TOKENS = 4096  # where nothing is measured
_POOL_SHARE = 0.8  # of the device's free memory; the rest is for activations
_TESTS = Path("tests/model/test_cuda.py")


class Skipped(Exception):
    """The stage does not apply here; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the stages are told. `quick` asks for a walk through the code, not for figures."""

    choice: Choice
    quick: bool


def device(job: Job, report: Report) -> None:
    """Name the device and the software, and measure what the device does at best."""
    facts: dict[str, Any] = {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    if job.choice.device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        facts["capability"] = f"{major}.{minor}"
        facts["cuda"] = torch.version.cuda
        facts["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    else:
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
    report(facts)
    rates = device_rates(job.choice.device, _kind(job), quick=job.quick)
    report({"copy_gb_per_s": rates.read_bytes_per_s / 1e9, "gemm_tflops": rates.gemm_flops_per_s / 1e12})


def model(job: Job, report: Report) -> None:
    """Load the model once: fetched and converted here, if at all, and not in a stage that measures."""
    begin_s = time.perf_counter()
    loaded = job.choice.build()
    sizes = ModelSizes.of(loaded.model)
    report({"model": loaded.info.name, "dtype": loaded.info.dtype, "load_s": time.perf_counter() - begin_s})
    report({name: getattr(sizes, name) for name in ModelSizes.__slots__})
    begin_s = time.perf_counter()
    paged = job.choice.paged(loaded, _POOL_TOKENS)
    report({"runner": paged.runner, "start_s": time.perf_counter() - begin_s})


def tests(job: Job, report: Report) -> None:
    """The project's own tests on CUDA, where they and pytest are there."""
    if not _TESTS.is_file() or importlib.util.find_spec("pytest") is None:
        raise Skipped(f"no {_TESTS} in this directory, or no pytest; the stage `checks` compares without them")
    command = module_command("pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", str(_TESTS))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    report({"result": lines[-1] if lines else "no output"})
    if done.returncode:
        raise RuntimeError("\n".join(lines[-40:]))


def checks(job: Job, report: Report) -> None:
    """The chosen model against transformers: float32 token for token, half precision where the margin decides."""
    prompts = draw_trace(1).prompt_ids
    lengths, outputs = ((5, 23, 40), (3, 6, 4)) if job.quick else ((5, 100, 300, 700), (8, 32, 16, 24))
    requests = [LoopRequest(prompts(i, n), new) for i, (n, new) in enumerate(zip(lengths, outputs, strict=True))]
    wrong = 0
    for dtype in dict.fromkeys(("float32", job.choice.dtype)):
        choice = replace(job.choice, dtype=dtype)
        loaded = choice.build()
        own = loaded.model.config._attn_implementation
        expected = [alone(loaded.model, request) for request in requests] if dtype == "float32" else []
        paged = choice.paged(loaded, _POOL_TOKENS)
        report({"dtype": dtype, "runner": paged.runner})
        longest = max(lengths)
        for chunk in dict.fromkeys((7, choice.block_tokens, longest - 1, longest)):
            got = together(
                paged, requests, chunk=chunk, block_tokens=choice.block_tokens,
                total_blocks=choice.blocks(_POOL_TOKENS), rows=2,
            )  # fmt: skip
            row: dict[str, Any] = {"dtype": dtype, "chunk": chunk}
            if dtype == "float32":
                same = sum(ours == theirs for ours, theirs in zip(got, expected, strict=True))
                row |= {"outputs": len(got), "equal": same}
                wrong += len(got) - same
            else:
                loaded.model.set_attn_implementation(own)
                found = [agreement(loaded.model, request, out) for request, out in zip(requests, got, strict=True)]
                loaded.model.set_attn_implementation("wsbatch_paged")
                row |= {name: sum(asdict(each)[name] for each in found) for name in ("tokens", "decided", "wrong")}
                wrong += row["wrong"]
            report(row)
        del paged, loaded
    if wrong:
        raise AssertionError(f"{wrong} outputs (float32) or decided tokens (half precision) are not transformers' own")


def decode(job: Job, report: Report) -> None:
    """A decode step against the batch size, beside the least time that memory and multiplication allow."""
    loaded = job.choice.build()
    sizes = ModelSizes.of(loaded.model)
    rates = device_rates(job.choice.device, _kind(job), quick=job.quick)
    context = min(CONTEXT, loaded.info.max_model_len // 2)
    steps, batches = (2, [1, 2, 4]) if job.quick else (30, [1 << power for power in range(10)])
    need = _row_tokens(job, context + steps)
    room = _room(job, sizes)
    fitting = [rows for rows in batches if rows * need <= room]
    paged = job.choice.paged(loaded, need * fitting[-1])
    report({"runner": paged.runner, "context": context})
    weights = sizes.linear_params + sizes.head_params
    for rows in batches:
        if rows not in fitting:
            report({"rows": rows, "missing": "its KV does not fit the device's memory"})
            continue
        step_s = decode_s(paged, rows=rows, context=context, block_tokens=job.choice.block_tokens, steps=steps)
        moved = weights * sizes.weight_bytes + rows * (context + steps // 2) * sizes.kv_bytes_per_token
        memory_s, compute_s = moved / rates.read_bytes_per_s, 2 * weights * rows / rates.gemm_flops_per_s
        report(
            {
                "rows": rows,
                "step_ms": 1e3 * step_s,
                "tokens_per_s": rows / step_s,
                "gb_per_s": moved / step_s / 1e9,
                "memory_limit_ms": 1e3 * memory_s,
                "compute_limit_ms": 1e3 * compute_s,
                "of_limit": max(memory_s, compute_s) / step_s,
            }
        )


def graphs(job: Job, report: Report) -> None:
    """Decode steps with CUDA graphs and without."""
    loaded = job.choice.build()
    own = loaded.model.config._attn_implementation
    context = min(CONTEXT, loaded.info.max_model_len // 2)
    steps, batches = (2, [1, 2]) if job.quick else (20, [1, 8, 32, 128])
    room = _room(job, ModelSizes.of(loaded.model))
    batches = [rows for rows in batches if rows * _row_tokens(job, context + steps) <= room]
    for with_graphs in (True, False):
        loaded.model.set_attn_implementation(own)
        tokens = batches[-1] * _row_tokens(job, context + steps)
        paged = job.choice.paged(loaded, tokens, graphs=with_graphs)
        for rows in batches:
            step_s = decode_s(paged, rows=rows, context=context, block_tokens=job.choice.block_tokens, steps=steps)
            report({"rows": rows, "graphs": "graphs" in paged.runner, "asked": with_graphs, "step_ms": 1e3 * step_s})
        del paged


def prefill(job: Job, report: Report) -> None:
    """What a prompt token costs, against the size of the chunks."""
    loaded = job.choice.build()
    tokens = min(64 if job.quick else 4096, loaded.info.max_model_len - 1)
    paged = job.choice.paged(loaded, tokens + job.choice.block_tokens)
    for chunk in (16, 64) if job.quick else (4096, 2048, 1024, 512, 256, 128, 64):
        took_s = prefill_s(
            paged, tokens=tokens, chunk=chunk, block_tokens=job.choice.block_tokens, tries=1 if job.quick else 2
        )
        report({"chunk": chunk, "prompt_tokens": tokens, "ms_a_token": 1e3 * took_s / tokens})


def offline(job: Job, report: Report) -> None:
    """Requests at once through scheduler and model, without sockets: output tokens a second."""
    loaded = job.choice.build()
    longest = loaded.info.max_model_len
    block = job.choice.block_tokens
    trace = draw_trace(4 if job.quick else 256)
    everything = [
        LoopRequest(
            trace.prompt_ids(index, min(entry.prompt_tokens, longest // 4)),
            min(entry.output_tokens, 4 if job.quick else longest // 2),
        )
        for index, entry in enumerate(trace.entries)
    ]
    need = sum(_row_tokens(job, len(each.prompt_ids) + each.output_tokens) for each in everything)
    held = int(min(need, _room(job, ModelSizes.of(loaded.model))))
    paged, blocks = job.choice.paged(loaded, held), job.choice.blocks(held)
    warm_up = [LoopRequest(request.prompt_ids, 4) for request in everything[:4]]
    run_loop(paged, _scheduler(blocks, block, rows=4), warm_up)
    for count, rows in ((4, 2),) if job.quick else ((64, 32), (64, 64), (256, 256)):
        run = run_loop(paged, _scheduler(blocks, block, rows=rows), everything[:count])
        report(
            {
                "requests": count,
                "rows": rows,
                "prompt_tokens": sum(len(row.request.prompt_ids) for row in run.rows),
                "output_tokens": run.output_tokens,
                "seconds": run.total_s,
                "tokens_per_s": run.output_tokens / run.total_s,
                "model_share": run.model_s / run.total_s,
            }
        )


def _scheduler(blocks: int, block_tokens: int, *, rows: int) -> ContinuousScheduler:
    pool = BlockPool(blocks, block_tokens, prefix_cache=False)
    return ContinuousScheduler(max_batch_size=rows, max_batch_prefill_tokens=2048, prefill_chunk_tokens=512, pool=pool)


def _kind(job: Job) -> torch.dtype:
    kind: torch.dtype = getattr(torch, job.choice.dtype)
    return kind


def _row_tokens(job: Job, tokens: int) -> int:
    """Rounded up to whole blocks, with some steps to warm up."""
    return -(-(tokens + 8) // job.choice.block_tokens) * job.choice.block_tokens


def _room(job: Job, sizes: ModelSizes) -> float:
    """Tokens of KV that the device has memory for."""
    if job.choice.device != "cuda":
        return inf
    free_bytes, _ = torch.cuda.mem_get_info()
    return _POOL_SHARE * free_bytes / sizes.kv_bytes_per_token


STAGES: dict[str, tuple[Callable[[Job, Report], None], float]] = {
    # name: what runs, and the seconds it may take; they add up to less than 8 minutes
    "device": (device, 30),
    "model": (model, 60),
    "tests": (tests, 110),
    "checks": (checks, 60),
    "decode": (decode, 65),
    "graphs": (graphs, 40),
    "prefill": (prefill, 40),
    "offline": (offline, 60),
}
