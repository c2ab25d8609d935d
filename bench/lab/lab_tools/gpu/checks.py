"""Whether a paged model says what the transformers model says, in float32 and as far as half precision can tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wsbatch.batching.blocks import BlockPool
from wsbatch.batching.continuous import ContinuousScheduler
from wsbatch_bench.steps.bare_loop import LoopRequest, Runs, run_loop

# Rounding in half precision moves a logit by about this share of the largest one: nearer leaders are a tie.
_ROUNDING = 0.05


def alone(module: Any, request: LoopRequest) -> list[int]:
    """What `transformers.generate` says to this prompt and nobody else, greedily."""
    ids = torch.tensor([request.prompt_ids], device=module.device)
    with torch.inference_mode():
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.output_tokens,
            min_new_tokens=request.output_tokens,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def together(
    model: Runs, requests: Sequence[LoopRequest], *, chunk: int, block_tokens: int, total_blocks: int, rows: int
) -> list[list[int]]:
    """What a paged model says to all of them through the scheduler, in batches of at most `rows`.

    With fewer rows than requests, and outputs of different lengths, some join while others are being answered.
    """
    scheduler = ContinuousScheduler(
        max_batch_size=rows,
        max_batch_prefill_tokens=chunk,
        prefill_chunk_tokens=chunk,
        pool=BlockPool(total_blocks, block_tokens, prefix_cache=False),
    )
    return [row.token_ids for row in run_loop(model, scheduler, requests).rows]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens that were compared, those of them whose margin decides, and those of the latter that are others."""

    tokens: int
    decided: int
    wrong: int


def agreement(module: Any, request: LoopRequest, output: Sequence[int]) -> Agreement:
    """Compare each token of an output with what `module` would choose after the same tokens, where its margin decides.

    The output itself is fed, so one near-tie does not spoil all that comes after it.
    """
    ids = torch.tensor([[*request.prompt_ids, *output[:-1]]], device=module.device)
    with torch.inference_mode():
        logits = module(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 :].float()  # [output, V]
    values, best = logits.topk(2, dim=-1)
    decided = values[:, 0] - values[:, 1] > _ROUNDING * logits.abs().amax(dim=-1)
    others = best[:, 0] != torch.tensor(list(output), device=logits.device)
    return Agreement(len(output), int(decided.sum()), int((decided & others).sum()))
