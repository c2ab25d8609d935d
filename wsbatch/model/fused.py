"""The fast runner: one C++ call a step for Llama-shaped models on CPU (`kernels/step.cpp`).

The module tree of transformers is read once for its weights; after that only pointers and index arrays cross.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsbatch.messages import SamplingParams, TokenLogprobs
from wsbatch.model.compiled import KernelsUnavailable, load_library
from wsbatch.model.kernel_structs import Batch, Choice, Config, Layer, Packed
from wsbatch.model.levels import Level
from wsbatch.model.linears import LANES, huge_zeros, interleave, pack, packed_shape
from wsbatch.model.ragged import Ragged
from wsbatch.model.sampling import uniform

_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # angles that depend on the position alone
_MAX_GROUP, _MAX_HEAD_DIM = 48, 512  # what the kernels' scratch memory holds
PARTS = ("linears", "attention", "head", "other")


class FusedRunner:
    """Runs ragged steps of a Llama, Mistral, Qwen2 or Qwen3 causal LM in float32 or bfloat16 on CPU.

    Args:
        model: of transformers, in eval mode. It stays unchanged, and is not used after the weights are read.
        total_blocks: KV blocks in the pool.
        block_tokens: tokens a block holds; a multiple of 16.
        max_model_len: the longest row, in tokens.
        threads: that compute, the caller's among them.
        level: the instructions that the kernels are compiled for.

    Raises KernelsUnavailable, naming the reason, where the model or this machine does not suit.
    """

    name = "fused"

    def __init__(
        self, model: Any, *, total_blocks: int, block_tokens: int, max_model_len: int, threads: int, level: Level
    ) -> None:
        config = model.config
        check(model, block_tokens)
        self._library = load_library(model.dtype, level)
        self._library.wsbatch_create.restype = ctypes.c_void_p
        self._library.wsbatch_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.wsbatch_choose.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self._library.wsbatch_destroy.argtypes = (ctypes.c_void_p,)
        self._dtype = model.dtype
        self._keep: list[Tensor] = []  # everything the kernels hold a pointer to
        attention = model.model.layers[0].self_attn
        self.vocab = model.lm_head.weight.shape[0]
        kv_heads = config.num_key_value_heads
        cos, sin = self._rotation(model, max_model_len)
        pool = huge_zeros(
            config.num_hidden_layers * total_blocks * kv_heads * 2 * block_tokens * attention.head_dim,
            dtype=self._dtype,
        )
        settings = Config(
            threads=threads,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            q_heads=config.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            block_tokens=block_tokens,
            total_blocks=total_blocks,
            eps=model.model.norm.variance_epsilon,
            scale=attention.scaling,
            embedding=self._hold(model.model.embed_tokens.weight),
            head=self._pack(model.lm_head.weight, model.lm_head.bias),
            final_norm=self._floats(model.model.norm.weight),
            cos=self._floats(cos),
            sin=self._floats(sin),
            pool=self._hold(pool),
        )
        layers = (Layer * config.num_hidden_layers)(*(self._layer(layer) for layer in model.model.layers))
        created = self._library.wsbatch_create(ctypes.byref(settings), layers)
        if created is None:
            raise KernelsUnavailable("there is no memory for the kernels' scratch")
        self._runner = ctypes.c_void_p(created)
        # Its helper threads would outlive it.
        self._finalizer = weakref.finalize(self, self._library.wsbatch_destroy, self._runner)
        self._stage_ms = np.zeros(len(PARTS))

    def close(self) -> None:
        """End the helper threads, as forgetting the runner does. It must not be used afterwards."""
        self._finalizer()

    def breakdown_ms(self) -> dict[str, float]:
        """Milliseconds spent in each part since the last call, as the calling thread saw them."""
        spent = dict(zip(PARTS, self._stage_ms.tolist(), strict=True))
        self._stage_ms[:] = 0
        return spent

    def run(self, ragged: Ragged, wanted: Sequence[bool]) -> tuple[list[int], Tensor, list[int]]:
        """Run one step.

        Args:
            wanted: one a sampling row, whether its logits are needed.

        Returns the most likely id of every sampling row (-1 where its largest logit is not finite, or one is NaN), the
        logits of the wanted rows, float32 [wanted rows, V], and the rows with a key or a value that is not finite.
        Raises MemoryError where the step finds no memory; nothing has been computed then.
        """
        logits = torch.empty(sum(wanted), self.vocab)
        addresses = np.zeros(len(wanted), np.uint64)
        addresses[np.asarray(wanted, bool)] = logits.data_ptr() + np.arange(len(logits)) * self.vocab * 4
        best = np.zeros(len(wanted), np.int64)
        broken = np.zeros(len(ragged.kv_lens), np.uint8)
        batch = Batch(
            rows=len(ragged.kv_lens),
            tokens=len(ragged.token_ids),
            samples=len(wanted),
            widest=ragged.block_tables.shape[1],
            token_ids=ragged.token_ids.ctypes.data,
            positions=ragged.positions.ctypes.data,
            sample_at=ragged.sample_at.ctypes.data,
            query_starts=ragged.query_starts.ctypes.data,
            kv_lens=ragged.kv_lens.ctypes.data,
            block_tables=ragged.block_tables.ctypes.data,
            logits=addresses.ctypes.data,
            best=best.ctypes.data,
            broken=broken.ctypes.data,
            stage_ms=self._stage_ms.ctypes.data,
        )
        if self._library.wsbatch_step(self._runner, ctypes.byref(batch)):
            raise MemoryError(f"no memory for a step of {batch.tokens} tokens")
        return best.tolist(), logits, np.flatnonzero(broken).tolist()

    def sample(
        self, logits: Tensor, rows: Sequence[SamplingParams], positions: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """As `sampling.sample`, for float32 logits, and many times faster (`kernels/sampling.cpp`)."""
        vocab = logits.shape[-1]
        count = max(((row.logprobs or 0) for row in rows), default=0)
        top_ids = np.zeros((len(rows), count), np.int32)
        top_logprobs = np.zeros((len(rows), count), np.float32)
        choices = (Choice * len(rows))(
            *(
                Choice(
                    logits=logits.data_ptr() + index * vocab * 4,
                    vocab=vocab,
                    top_k=row.top_k,
                    temperature=row.temperature,
                    top_p=row.top_p,
                    noise=uniform(row.seed or 0, position) if row.temperature > 0 else 0.0,
                    logprobs=-1 if row.logprobs is None else row.logprobs,
                    top_ids=top_ids.ctypes.data + index * count * 4,
                    top_logprobs=top_logprobs.ctypes.data + index * count * 4,
                )
                for index, (row, position) in enumerate(zip(rows, positions, strict=True))
            )
        )
        if self._library.wsbatch_choose(self._runner, choices, len(rows)):
            raise MemoryError(f"no memory to choose from {vocab} logits")
        ids = [choice.id for choice in choices]
        asked = [
            None
            if row.logprobs is None or choice.id < 0
            else (
                choice.own,
                tuple(
                    zip(
                        best[: min(row.logprobs, vocab)].tolist(),
                        values[: min(row.logprobs, vocab)].tolist(),
                        strict=True,
                    )
                ),
            )
            for row, choice, best, values in zip(rows, choices, top_ids, top_logprobs, strict=True)
        ]
        return ids, asked if any(row is not None for row in asked) else None

    def _rotation(self, model: Any, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [length, D], rounded as the model itself rounds them."""
        like = torch.zeros(1, dtype=self._dtype)
        with torch.inference_mode():
            cos, sin = model.model.rotary_emb(like, torch.arange(length)[None])
        return cos[0], sin[0]

    @staticmethod
    def _window(attention: Any) -> int:
        """The layer's sliding window in tokens, 0 for none. Mistral has one for all layers, in its configuration."""
        if attention.config.model_type == "mistral":
            return attention.config.sliding_window or 0
        return getattr(attention, "sliding_window", None) or 0

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [linear.bias for linear in qkv]
        gate_bias = mlp.gate_proj.bias
        return Layer(
            qkv=self._pack(
                torch.cat([linear.weight for linear in qkv]), None if biases[0] is None else torch.cat(biases)
            ),
            o=self._pack(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=self._pack(
                interleave(mlp.gate_proj.weight, mlp.up_proj.weight),
                None if gate_bias is None else interleave(gate_bias, mlp.up_proj.bias),
            ),
            down=self._pack(mlp.down_proj.weight, mlp.down_proj.bias),
            attention_norm=self._floats(layer.input_layernorm.weight),
            mlp_norm=self._floats(layer.post_attention_layernorm.weight),
            q_norm=self._floats(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
            k_norm=self._floats(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
            window=self._window(attention),
        )

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        n, k = weight.shape
        panels = huge_zeros(*packed_shape(n, k, self._dtype), dtype=self._dtype)
        pack(weight.detach(), panels)
        padded = None
        if bias is not None:
            padded = torch.zeros(panels.shape[0] * LANES)
            padded[:n] = bias.detach()
        return Packed(panels=self._hold(panels), bias=None if padded is None else self._hold(padded), n=n, k=k)

    def _floats(self, tensor: Tensor) -> int:
        return self._hold(tensor.detach().float().contiguous())

    def _hold(self, tensor: Tensor) -> int:
        self._keep.append(tensor)
        return tensor.data_ptr()


def check(model: Any, block_tokens: int) -> None:
    """Raises KernelsUnavailable, naming the reason, where the kernels do not compute this model."""
    if model.device.type != "cpu":
        raise KernelsUnavailable(f"the model is on {model.device.type}")
    check_config(model.config, block_tokens)


def check_config(config: Any, block_tokens: int) -> None:
    """The same, as far as a model's configuration tells."""
    if config.model_type not in _MODEL_TYPES:
        raise KernelsUnavailable(f"{config.model_type} is not one of {', '.join(sorted(_MODEL_TYPES))}")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in _ROPE_TYPES or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise KernelsUnavailable(f"its position encoding ({rope}) is not one of {', '.join(sorted(_ROPE_TYPES))}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "block_tokens": block_tokens,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size % LANES:
            raise KernelsUnavailable(f"{name} is {size}, not a multiple of {LANES}")
    if config.hidden_act not in ("silu", "swish"):
        raise KernelsUnavailable(f"its activation is {config.hidden_act}, not silu")
    if head_dim > _MAX_HEAD_DIM or config.num_attention_heads // config.num_key_value_heads > _MAX_GROUP:
        raise KernelsUnavailable(f"head_dim {head_dim} or query heads per KV head exceed {_MAX_HEAD_DIM}, {_MAX_GROUP}")
