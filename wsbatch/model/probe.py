"""The check at load: whether a runner computes what the model itself computes.

Which architectures run on ragged batches is not read off a list. Two short rows, one of them in two chunks and in
blocks out of order, go through the runner, then their last tokens once more as a decode step, and the logits are
compared with those of the model's own forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wsbatch.model.ragged import Ragged, flatten
from wsbatch.steps import PagedRow, PagedStep, RowSampling

_LONG, _SHORT, _CUT = 7, 3, 4  # tokens of the two rows; where the long one is cut into chunks

Run = Callable[[Ragged, Sequence[bool]], tuple[list[int], Tensor]]


def _prompts(vocab: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple((17 * i + 5) % vocab for i in range(_LONG)), tuple((29 * i + 11) % vocab for i in range(_SHORT))


def expected(model: Any) -> Tensor:
    """The model's own last logits of the two rows, [2, V] in float32. Call it before its attention is replaced."""
    with torch.inference_mode():
        rows = [
            model(torch.tensor([row], device=model.device), use_cache=False).logits[0, -1].float()
            for row in _prompts(model.get_output_embeddings().weight.shape[0])
        ]
    return torch.stack(rows)


def blocks_needed(block_tokens: int) -> int:
    """Blocks that `differs` writes to, from number 0."""
    return 2 * -(-_LONG // block_tokens)


def differs(run: Run, reference: Tensor, *, dtype: torch.dtype, block_tokens: int) -> str | None:
    """Run the two rows through a runner. Returns what is wrong with its logits, or None. Raises what `run` raises.

    `dtype` is the model's, which says how far rounding may take two right answers apart.
    """
    long, short = _prompts(reference.shape[-1])
    blocks = blocks_needed(block_tokens)
    mine, theirs = tuple(range(blocks // 2, blocks)), tuple(range(blocks // 2))
    greedy = RowSampling()
    first = PagedStep((PagedRow(0, long[:_CUT], 0, mine, None),))
    second = PagedStep((PagedRow(1, short, 0, theirs, greedy), PagedRow(0, long[_CUT:], _CUT, mine, greedy)))
    decode = PagedStep(
        (PagedRow(1, short[-1:], _SHORT - 1, theirs, greedy), PagedRow(0, long[-1:], _LONG - 1, mine, greedy))
    )
    # Rounding: bfloat16 keeps 8 bits, and sums in another order. A wrong model is off by as much as the logits are.
    allowed = (1e-3 if dtype == torch.float32 else 0.1) * float(reference.abs().max())
    run(flatten(first, block_tokens=block_tokens, total_blocks=blocks), [])
    for name, step in (("ragged run", second), ("decode step", decode)):
        _, logits = run(flatten(step, block_tokens=block_tokens, total_blocks=blocks), [True, True])
        wrong = float((logits.float().cpu() - reference.cpu().flip(0)).abs().max())
        if not wrong <= allowed:  # NaN is wrong, too
            return f"a {name} gives logits off by {wrong:.3g} from the model's own forward"
    return None
