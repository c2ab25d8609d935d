"""Attention over the paged KV pool: one function for every device, called by transformers' own modules.

`AttentionInterface` lets a function stand in for a model's attention: it gets the rotated queries, keys and values
of one ragged [1, T] batch. Ours writes the keys and values into the pool and attends over each row's blocks. The step's
index tensors travel as a keyword argument that transformers hands through its layers untouched.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from wsbatch.model.ragged import Ragged

NAME = "wsbatch_paged"

# What another architecture's attention may ask for and this one does not compute: refused by name, never ignored.
# transformers makes no mask for an attention function that it does not know: one that comes is the architecture's own.
_UNSUPPORTED = frozenset(
    ("attention_mask", "softcap", "s_aux", "position_bias", "head_mask", "sinks", "indices", "block_indices")
)


@dataclass(slots=True)
class Pool:
    """The KV of all blocks, one pair of tensors a layer: [blocks, block_tokens, Hkv, D]."""

    keys: list[Tensor]
    values: list[Tensor]
    block_tokens: int


@dataclass(slots=True)
class PagedBatch:
    """The step's index tensors, on the model's device.

    Attributes:
        pool: where keys and values live.
        slots: int64 [T], place of each new token in the pool, counted in tokens.
        single: rows with one new token: (flat query index [B], KV slots [B, longest], KV lengths [B]), or None. Beyond
            a row's own length the slots repeat its last one.
        chunks: rows with several: (query start, query end, KV slots [S]).
        varlen: what torch's variable-length attention takes instead (CUDA), or None.
        checked: float32 [T], for each new token the sum of its keys and values in all layers so far: finite where they
            are; or None. SDPA may make a finite answer of keys that are not.
        calls: (layer, sliding window) of each call so far; the check at load reads it.
    """

    pool: Pool
    slots: Tensor
    single: tuple[Tensor, Tensor, Tensor] | None
    chunks: list[tuple[int, int, Tensor]]
    varlen: "Varlen | None" = None
    checked: Tensor | None = None
    calls: list[tuple[int, int | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Varlen:
    """Arguments of `torch.nn.attention.varlen.varlen_attn` with a block table, int32 on the device."""

    query_starts: Tensor  # [R + 1]
    kv_starts: Tensor  # [R + 1]
    kv_lens: Tensor  # [R]
    block_tables: Tensor  # [R, widest]
    max_query: int
    max_kv: int


def place(ragged: Ragged, pool: Pool, device: torch.device, *, varlen: bool = False) -> PagedBatch:
    """Turn a step's flat arrays into the tensors the attention function reads.

    `varlen` takes torch's variable-length attention (CUDA, float16 and bfloat16) instead of plain torch row by row.
    """
    size = pool.block_tokens
    lens = np.diff(ragged.query_starts)

    def slots_of(rows: Any, places: Any) -> Tensor:
        found = ragged.block_tables[rows, places // size].astype(np.int64) * size + places % size
        return torch.from_numpy(found).to(device)

    checked = torch.zeros(len(ragged.token_ids), device=device)
    slots = slots_of(np.repeat(np.arange(len(lens)), lens), ragged.positions)
    if varlen:
        kv_starts = np.concatenate(([0], np.cumsum(ragged.kv_lens))).astype(np.int32)
        arguments = Varlen(
            query_starts=torch.from_numpy(ragged.query_starts).to(device),
            kv_starts=torch.from_numpy(kv_starts).to(device),
            kv_lens=torch.from_numpy(ragged.kv_lens).to(device),
            block_tables=torch.from_numpy(ragged.block_tables).to(device),
            max_query=int(lens.max()),
            max_kv=int(ragged.kv_lens.max()),
        )
        return PagedBatch(pool, slots, None, [], arguments, checked)
    one = np.flatnonzero(lens == 1)
    single = None
    if one.size:
        kv_lens = ragged.kv_lens[one].astype(np.int64)
        single = (
            torch.from_numpy(ragged.query_starts[one].astype(np.int64)).to(device),
            # A masked value is still multiplied, by zero: another row's NaN would come through.
            slots_of(one[:, None], np.minimum(np.arange(kv_lens.max()), kv_lens[:, None] - 1)),
            torch.from_numpy(kv_lens).to(device),
        )
    chunks = []
    for row in np.flatnonzero(lens > 1):
        start, end = int(ragged.query_starts[row]), int(ragged.query_starts[row + 1])
        chunks.append((start, end, slots_of(row, np.arange(ragged.kv_lens[row]))))
    return PagedBatch(pool, slots, single, chunks, checked=checked)


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    *,
    paged: PagedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write this step's keys and values, attend over each row's own blocks. Returns ([1, T, Hq, D], None).

    Raises NotImplementedError, naming it, for a feature of the architecture that this function does not compute.
    """
    for name, asked in (("attention_mask", attention_mask), *kwargs.items()):
        if asked is not None and name in _UNSUPPORTED:
            raise NotImplementedError(f"its attention uses {name}, which paged attention does not compute")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise NotImplementedError("its attention layers carry no layer_idx")
    paged.calls.append((layer, sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = paged.pool.keys[layer], paged.pool.values[layer]
    q = query[0].transpose(0, 1)  # [T, Hq, D]
    keys.view(-1, *keys.shape[2:]).index_copy_(0, paged.slots, key[0].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(0, paged.slots, value[0].transpose(0, 1))
    if paged.checked is not None:
        for written in (key[0], value[0]):
            paged.checked += written.sum(dim=(0, 2), dtype=torch.float32)
    if paged.varlen is not None:
        out = _varlen(q, keys, values, paged.varlen, scale, sliding_window)
    else:
        out = _by_row(q, keys, values, paged, scale, sliding_window)
    return out.unsqueeze(0), None


def _by_row(q: Tensor, keys: Tensor, values: Tensor, paged: PagedBatch, scale: float, window: int | None) -> Tensor:
    """Plain torch: gather each row's KV, then SDPA; rows with one query share a padded call."""
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
    keys, values = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
    gqa = q.shape[1] != keys.shape[1]
    if paged.single is not None:
        at, slots, lens = paged.single
        k, v = keys[slots].transpose(1, 2), values[slots].transpose(1, 2)  # [B, Hkv, S, D]
        places = torch.arange(slots.shape[1], device=q.device)
        mask = places < lens[:, None]
        if window is not None:
            mask &= places >= lens[:, None] - window
        got = scaled_dot_product_attention(
            q[at].unsqueeze(2), k, v, attn_mask=mask[:, None, None], scale=scale, enable_gqa=gqa
        )
        out[at] = got.squeeze(2)
    for start, end, slots in paged.chunks:
        k, v = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)  # [Hkv, S, D]
        places = torch.arange(slots.shape[0], device=q.device)
        positions = places[start - end :, None]
        mask = places <= positions
        if window is not None:
            mask &= places > positions - window
        got = scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=gqa
        )
        out[start:end] = got[0].transpose(0, 1)
    return out


def _varlen(q: Tensor, keys: Tensor, values: Tensor, at: Varlen, scale: float, window: int | None) -> Tensor:
    """torch's paged FlashAttention. Queries align with the end of each row's KV, so causal is a window of (-1, 0).

    torch's own FlashAttention 2 asks for blocks of a multiple of 256 tokens (and compute capability 8).
    """
    from torch.nn.attention.varlen import varlen_attn

    visible = (-1 if window is None else window - 1, 0)
    if window is None and at.max_query == 1:
        # The only query of a row sees all of it. Without a mask the query heads of a group become rows of one product,
        # which reads their KV once.
        visible = (-1, -1)
    out = varlen_attn(
        q,
        keys,
        values,
        at.query_starts,
        at.kv_starts,
        at.max_query,
        at.max_kv,
        scale=scale,
        window_size=visible,
        enable_gqa=q.shape[1] != keys.shape[2],
        seqused_k=at.kv_lens,
        block_table=at.block_tables,
        # Left to itself FlashAttention 2 may split a row's KV, and then writes every row's output over the first
        # (pytorch issue 194167). One split also makes a row's result independent of the other rows.
        num_splits=1,
    )
    assert isinstance(out, Tensor)  # only return_aux makes it a pair
    return out


AttentionInterface.register(NAME, paged_attention)
