"""The reference runner: transformers' own modules on one ragged [1, T] batch, with paged attention inside.

It works for every architecture that goes through transformers' attention interface, on CPU and CUDA, and it is what
the fused runner is tested against. What it cannot compute is refused at load, with the reason.
"""

import inspect
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsbatch.model.attention import NAME, PagedBatch, Pool, place
from wsbatch.model.graphs import SIZES, DecodeGraphs
from wsbatch.model.ragged import Ragged, flatten
from wsbatch.steps import PagedRow, PagedStep

_log = logging.getLogger("wsbatch.model")

_LAYER_TYPES = {"full_attention", "sliding_attention"}


class ModulesRunner:
    """Runs ragged steps through a transformers causal language model.

    Args:
        model: a causal LM of transformers, in eval mode, on the device it shall run on. Its attention is replaced.
        total_blocks: KV blocks in the pool.
        block_tokens: tokens a block holds.
        max_model_len: the longest row, in tokens; decides whether a sliding window matters.
        graphs: capture CUDA graphs of decode steps, where torch's variable-length attention runs.

    Raises ValueError, naming the reason, for a model that cannot run this way.
    """

    def __init__(
        self, model: Any, *, total_blocks: int, block_tokens: int, max_model_len: int, graphs: bool = True
    ) -> None:
        config = model.config.get_text_config()
        self._model = model
        _check_static(model, config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (block_tokens, heads, head_dim)
        self._layers: int = config.num_hidden_layers
        self._device: torch.device = model.device
        self._graphs: DecodeGraphs | None = None
        model.set_attn_implementation(NAME)
        # One block more than the scheduler knows of: where the padding rows of a CUDA graph write.
        self._pool = self._make_pool(total_blocks + 1)
        self._calls: list[tuple[int, int | None]] = []
        self._varlen = self._device.type == "cuda" and model.dtype in (torch.float16, torch.bfloat16)
        one = flatten(
            PagedStep((PagedRow(0, (0,), 0, (0,), None),)), block_tokens=block_tokens, total_blocks=total_blocks
        )
        if self._varlen:
            try:
                self._forward(one)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ImportError) as error:  # what it asks for differs between torch's releases
                _log.warning(
                    "torch %s's variable-length attention cannot run here with blocks of %d tokens, plain torch "
                    "replaces it: %s", torch.__version__, block_tokens, str(error).partition("\n")[0],
                )  # fmt: skip
                self._varlen = False
        # One token tells whether every layer reaches the attention function, and with which window.
        try:
            self._forward(one)
        except (NotImplementedError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise refusal(model, str(error)) from error
        if [layer for layer, _ in self._calls] != list(range(self._layers)):
            raise refusal(model, "not every layer goes through transformers' attention interface")
        _check_windows(model, config, [window for _, window in self._calls], max_model_len)
        if self._varlen and graphs:
            # Every row writes into a block of its own, so there are never more rows than blocks.
            self._capture(-(-max_model_len // block_tokens), [size for size in SIZES if size < 2 * total_blocks])

    @property
    def name(self) -> str:
        """What it runs on, for logs and reports."""
        if not self._varlen:
            return "modules"
        return "modules, variable-length attention" + ("" if self._graphs is None else ", CUDA graphs")

    def simplify(self) -> bool:
        """Go on with plain torch instead of variable-length attention and graphs. False where it already does."""
        changed, self._varlen, self._graphs = self._varlen, False, None
        return changed

    def _capture(self, widest: int, sizes: list[int]) -> None:
        """Record decode steps of up to `sizes[-1]` rows and `widest` blocks; where that fails, do without."""
        began = time.perf_counter()
        try:
            self._graphs = DecodeGraphs(self._logits, self._pool, widest=widest, device=self._device, sizes=sizes)
        except RuntimeError as error:  # a model that looks at its numbers while it runs, or no memory left
            _log.warning("decode steps cannot be captured as CUDA graphs: %s", str(error).partition("\n")[0])
        else:
            took_s = time.perf_counter() - began
            _log.info("decode steps of up to %d rows captured as CUDA graphs in %.1f s", sizes[-1], took_s)

    def _make_pool(self, blocks: int) -> Pool:
        def make() -> list[Tensor]:
            return [
                torch.zeros(blocks, *self._shape, dtype=self._model.dtype, device=self._device)
                for _ in range(self._layers)
            ]

        return Pool(make(), make(), self._shape[0])

    @torch.inference_mode()
    def _logits(self, token_ids: Tensor, positions: Tensor, keep: Tensor | None, paged: PagedBatch) -> Tensor | None:
        """Logits [S, V] of the flat tokens at `keep` [S], of [T] tokens; None where nothing is kept."""
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False, "paged": paged}
        if keep is None:
            self._model.base_model(**inputs)
            return None
        logits: Tensor = self._model(**inputs, logits_to_keep=keep).logits
        return logits[0]

    def run(self, ragged: Ragged, wanted: Sequence[bool]) -> tuple[list[int], Tensor, list[int]]:
        """Run one step.

        Args:
            wanted: one a sampling row, whether its logits are needed.

        Returns the most likely id of every sampling row (-1 where its largest logit is not finite, or one is NaN), the
        logits of the wanted rows, [wanted rows, V] in the model's dtype, and the rows with a key or a value that is
        not finite.
        """
        if self._graphs is not None and self._graphs.suit(ragged):
            logits: Tensor | None = self._graphs.run(ragged)
            broken: list[int] = []
        else:
            logits, checked = self._forward(ragged)
            finite = checked.isfinite().cpu().numpy()  # [T]
            broken = np.flatnonzero(~np.logical_and.reduceat(finite, ragged.query_starts[:-1])).tolist()
        if logits is None:
            return [], torch.empty(0), broken
        peaks, ids = logits.max(dim=-1)
        best: list[int] = ids.masked_fill(~peaks.isfinite(), -1).tolist()
        return best, logits[torch.tensor(wanted, device=self._device)], broken

    def _forward(self, ragged: Ragged) -> tuple[Tensor | None, Tensor]:
        """The step's logits [S, V], None where no row samples, and `PagedBatch.checked`."""
        token_ids, positions, keep = (
            torch.from_numpy(array).to(self._device) for array in (ragged.token_ids, ragged.positions, ragged.sample_at)
        )
        paged = place(ragged, self._pool, self._device, varlen=self._varlen)
        logits = self._logits(token_ids, positions, keep if len(ragged.sample_at) else None, paged)
        self._calls = paged.calls
        assert paged.checked is not None  # `place` has made it
        return logits, paged.checked


def refusal(model: Any, reason: str) -> ValueError:
    """The error for a model that cannot run ragged paged steps."""
    return ValueError(
        f"{type(model).__name__} cannot run with the continuous scheduler: {reason}; the dynamic scheduler may serve it"
    )


def _check_static(model: Any, config: Any) -> None:
    """What can be told from the class and the configuration alone."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "it is an encoder-decoder model")
    if not getattr(type(model), "_supports_attention_backend", False) or not model._can_set_attn_implementation():
        raise refusal(model, "it does not use transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise refusal(model, "its forward takes no logits_to_keep")
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise refusal(model, f"it has layers of type {', '.join(sorted(others))}")


def _check_windows(model: Any, config: Any, windows: list[int | None], max_model_len: int) -> None:
    """A sliding window must have reached the attention function in every layer that has one."""
    size = getattr(config, "sliding_window", None)
    if size is None or size >= max_model_len or getattr(config, "use_sliding_window", True) is False:
        return
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    if windows != [size if kind == "sliding_attention" else None for kind in types]:
        raise refusal(model, f"its sliding window of {size} tokens does not reach the attention function")
