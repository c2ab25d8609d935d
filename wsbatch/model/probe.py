"""The check at load: whether a runner computes what the model itself computes.

Which architectures run on ragged batches is not read off a list. Two rows, one of them in two chunks and in blocks out
of order, go through the runner, then their last tokens once more as a decode step, and the logits are compared with
those of the model's own forward. One row is longer than every window and period that the configuration names, as far as
that can be afforded: what happens only beyond them would not be seen otherwise.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wsbatch.messages import SamplingParams
from wsbatch.model.ragged import Ragged, flatten
from wsbatch.steps import PagedRow, PagedStep

_SHORT = 3  # tokens of the one row
_LONG = 7  # and of the other, or how far it goes beyond what the configuration names
_AFFORDABLE_TOKENS = 640  # seconds on a CPU for a model of a billion parameters

# Settings that count tokens; those that count layers or experts, or cut work into pieces with the same result, do not.
_IN_TOKENS = re.compile(r"window|chunk|local_att|block_size|period|floor")
_NOT_TOKENS = re.compile(r"layer|expert|pattern|feed_forward|lm_head|conv|mamba|mask_")

Run = Callable[[Ragged, Sequence[bool]], tuple[list[int], Tensor, list[int]]]


def spans(config: Any, reach: int) -> dict[str, int]:
    """The windows and periods that a configuration names and that rows of `reach` tokens get beyond, in tokens."""
    decoder = config.get_text_config(decoder=True)
    known = inspect.signature(type(decoder)).parameters  # a file may name what the architecture does not read
    names = [name for name in known if _IN_TOKENS.search(name) and not _NOT_TOKENS.search(name)]
    values = {name: getattr(decoder, name, None) for name in names}
    return {name: value for name, value in values.items() if type(value) is int and 0 < value < reach}


@dataclass(frozen=True, slots=True)
class Probe:
    """What the model itself says to the two rows.

    Attributes:
        long: tokens of the longer row.
        logits: its own last logits of the longer and the shorter row, [2, V] in float32.
        unseen: what `spans` names and the longer row does not get beyond.
    """

    long: int
    logits: Tensor
    unseen: dict[str, int]

    @classmethod
    def of(cls, model: Any, *, block_tokens: int, total_blocks: int, max_model_len: int) -> "Probe":
        """Ask a model for it, before its attention is replaced. The rows fit `total_blocks` blocks.

        ValueError where there is not even room for two short rows.
        """
        needed = _blocks(_LONG, block_tokens) + _blocks(_SHORT, block_tokens)
        if total_blocks < needed:
            raise ValueError(f"total_blocks={total_blocks} is below {needed}")
        room = (total_blocks - _blocks(_SHORT, block_tokens)) * block_tokens
        named = spans(model.config, min(max_model_len, total_blocks * block_tokens))
        most = min(_AFFORDABLE_TOKENS, room, max(_LONG, max_model_len))
        seen = {name: span for name, span in named.items() if span < most}
        long = min(max(seen.values(), default=0) + _LONG, most)
        vocab = model.get_output_embeddings().weight.shape[0]
        with torch.inference_mode():
            rows = [
                model(torch.tensor([row], device=model.device), use_cache=False).logits[0, -1].float()
                for row in _prompts(long, vocab)
            ]
        return cls(long, torch.stack(rows), {name: span for name, span in named.items() if name not in seen})

    def differs(self, run: Run, *, dtype: torch.dtype, block_tokens: int) -> str | None:
        """Run the two rows through a runner. Returns what is wrong with its logits, or None. Raises what `run` raises.

        `dtype` is the model's, which says how far rounding may take two right answers apart.
        """
        long, short = _prompts(self.long, self.logits.shape[-1])
        cut = self.long // 2 + 1
        theirs = tuple(range(_blocks(_SHORT, block_tokens)))
        mine = tuple(range(len(theirs), len(theirs) + _blocks(self.long, block_tokens)))[::-1]
        greedy = SamplingParams()
        first = PagedStep((PagedRow(0, long[:cut], 0, mine, None),))
        second = PagedStep((PagedRow(1, short, 0, theirs, greedy), PagedRow(0, long[cut:], cut, mine, greedy)))
        decode = PagedStep(
            (
                PagedRow(1, short[-1:], _SHORT - 1, theirs, greedy),
                PagedRow(0, long[-1:], self.long - 1, mine, greedy),
            )
        )
        # Rounding: bfloat16 keeps 8 bits, and sums in another order. A wrong model is off by as much as the logits are.
        allowed = (1e-3 if dtype == torch.float32 else 0.1) * float(self.logits.abs().max())
        total_blocks = len(theirs) + len(mine)
        run(flatten(first, block_tokens=block_tokens, total_blocks=total_blocks), [])
        for name, step in (("ragged run", second), ("decode step", decode)):
            _, logits, _ = run(flatten(step, block_tokens=block_tokens, total_blocks=total_blocks), [True, True])
            wrong = float((logits.float().cpu() - self.logits.cpu().flip(0)).abs().max())
            if not wrong <= allowed:  # NaN is wrong, too
                return f"a {name} gives logits off by {wrong:.3g} from the model's own forward"
        return None


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def _prompts(long: int, vocab: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two rows. Squares keep the longer one from repeating itself within a window."""
    return tuple((17 * i + i * i + 5) % vocab for i in range(long)), tuple((29 * i + 11) % vocab for i in range(_SHORT))
