"""The reference runner: transformers' own modules on one ragged [1, T] batch, with paged attention inside.

It works for every architecture that goes through transformers' attention interface, on CPU and CUDA, and it is what
the fused runner is tested against. Whether an architecture really works is not read off a list: at load a short
ragged run is compared with the model's own forward, and a difference is a refusal that names its reason.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from wsbatch.model.attention import NAME, PagedBatch, Pool, place
from wsbatch.model.ragged import Ragged, flatten
from wsbatch.steps import PagedRow, PagedStep, RowSampling

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_TOKENS = 7


class ModulesRunner:
    """Runs ragged steps through a transformers causal language model.

    Args:
        model: a causal LM of transformers, in eval mode, on the device it shall run on. Its attention is replaced.
        total_blocks: KV blocks in the pool.
        block_tokens: tokens a block holds.
        max_model_len: the longest row, in tokens; decides whether a sliding window or a position scheme matters.

    Raises ValueError, naming the reason, for a model that cannot run this way.
    """

    name = "modules"

    def __init__(self, model: Any, *, total_blocks: int, block_tokens: int, max_model_len: int) -> None:
        config = model.config.get_text_config()
        self.model = model
        self._max_model_len = max_model_len
        _check_static(model, config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (block_tokens, heads, head_dim)
        self._layers = config.num_hidden_layers
        self.device: torch.device = model.device
        self._verify(config)
        self.pool = self._make_pool(total_blocks)

    def _make_pool(self, blocks: int) -> Pool:
        def make() -> list[Tensor]:
            return [
                torch.zeros(blocks, *self._shape, dtype=self.model.dtype, device=self.device)
                for _ in range(self._layers)
            ]

        return Pool(make(), make(), self._shape[0])

    def logits(self, ragged: Ragged) -> Tensor | None:
        """Run one step. Returns the sampling rows' logits, [S, V] in the model's dtype; None where no row samples."""
        return self._forward(ragged, place(ragged, self.pool, self.device))

    @torch.inference_mode()
    def _forward(self, ragged: Ragged, paged: PagedBatch) -> Tensor | None:
        inputs = {
            "input_ids": torch.from_numpy(ragged.token_ids).to(self.device)[None],  # [1, T]
            "position_ids": torch.from_numpy(ragged.positions).to(self.device)[None],
            "use_cache": False,
            "paged": paged,
        }
        if not len(ragged.sample_at):
            self.model.base_model(**inputs)
            return None
        keep = torch.from_numpy(ragged.sample_at).to(self.device)
        logits: Tensor = self.model(**inputs, logits_to_keep=keep).logits
        return logits[0]  # [S, V]

    def _verify(self, config: Any) -> None:
        """Compare two rows, one of them in two chunks, with the model's own forward. Switches the attention over."""
        vocab = config.vocab_size
        ids = tuple((17 * i + 5) % vocab for i in range(_PROBE_TOKENS))
        other = tuple((29 * i + 11) % vocab for i in range(3))
        with torch.inference_mode():
            expected = [
                self.model(torch.tensor([row], device=self.device), use_cache=False).logits[0, -1].float()
                for row in (ids, other)
            ]
        self.model.set_attn_implementation(NAME)
        blocks = -(-_PROBE_TOKENS // self._shape[0])
        pool = self._make_pool(3 * blocks)
        mine, theirs = tuple(range(blocks, 2 * blocks)), tuple(range(blocks))
        greedy = RowSampling()
        first = PagedStep((PagedRow(0, ids[:4], 0, mine, None),))
        second = PagedStep((PagedRow(1, other, 0, theirs, greedy), PagedRow(0, ids[4:], 4, mine, greedy)))
        try:
            for step in (first, second):
                ragged = flatten(step, block_tokens=self._shape[0], total_blocks=3 * blocks)
                paged = place(ragged, pool, self.device)
                logits = self._forward(ragged, paged)
        except (NotImplementedError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            raise _refusal(self.model, str(error)) from error
        if [layer for layer, _ in paged.calls] != list(range(self._layers)):
            raise _refusal(self.model, "not every layer goes through transformers' attention interface")
        _check_windows(self.model, config, [window for _, window in paged.calls], self._max_model_len)
        assert logits is not None  # both rows of the second step sample
        for got, want in zip(logits.float(), (expected[1], expected[0]), strict=True):
            # Rounding: bf16 keeps 8 bits, and sums in another order; a wrong model is off by the size of the logits.
            allowed = 1e-3 if self.model.dtype == torch.float32 else 0.1
            if not torch.allclose(got, want, rtol=0, atol=allowed * float(want.abs().max())):
                raise _refusal(self.model, "a ragged run gives other logits than the model's own forward")


def _refusal(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} cannot run with the continuous scheduler: {reason}; the dynamic scheduler may serve it"
    )


def _check_static(model: Any, config: Any) -> None:
    """What can be told from the class and the configuration alone."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, "it is an encoder-decoder model")
    if not getattr(type(model), "_supports_attention_backend", False) or not model._can_set_attn_implementation():
        raise _refusal(model, "it does not use transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise _refusal(model, "its forward takes no logits_to_keep")
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(others))}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        # Its angles depend on the longest row in the batch, so rows would change each other.
        raise _refusal(model, f"its position encoding ({kind}) depends on the length of the whole batch")


def _check_windows(model: Any, config: Any, windows: list[int | None], max_model_len: int) -> None:
    """A sliding window must have reached the attention function in every layer that has one."""
    size = getattr(config, "sliding_window", None)
    if size is None or size >= max_model_len or getattr(config, "use_sliding_window", True) is False:
        return
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(windows)
    if windows != [size if kind == "sliding_attention" else None for kind in types]:
        raise _refusal(model, f"its sliding window of {size} tokens does not reach the attention function")
