"""Paged attention in plain torch against attention written out row by row."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wsbatch.model.attention import Pool, paged_attention, place
from wsbatch.model.ragged import Ragged, flatten
from wsbatch.steps import PagedRow, PagedStep

BLOCK, BLOCKS, HEADS, KV_HEADS, DIM = 4, 24, 6, 2, 8
LAYER: Any = SimpleNamespace(layer_idx=1)


def pool() -> Pool:
    shape = (BLOCKS, BLOCK, KV_HEADS, DIM)
    return Pool([torch.zeros(shape) for _ in range(2)], [torch.zeros(shape) for _ in range(2)], BLOCK)


def ragged(rows: list[tuple[int, int]]) -> Ragged:
    """Rows of (start, new tokens), in shuffled blocks."""
    numbers = list(range(BLOCKS))
    random.Random(3).shuffle(numbers)
    free = iter(numbers)
    made = [
        PagedRow(key, (0,) * count, start, tuple(next(free) for _ in range(-(-(start + count) // BLOCK))), None)
        for key, (start, count) in enumerate(rows)
    ]
    return flatten(PagedStep(tuple(made)), block_tokens=BLOCK, total_blocks=BLOCKS)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """q [t, H, D] at positions from `start`, over k and v [S, Hkv, D]; one query and one head at a time."""
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        first = 0 if window is None else max(0, start + i - window + 1)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys, values = k[first : start + i + 1, shared], v[first : start + i + 1, shared]
            out[i, head] = torch.softmax(keys @ q[i, head] * 0.3, dim=0) @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 9)], [(6, 1), (0, 3), (11, 1), (5, 8), (3, 1)]])
def test_each_row_attends_over_its_own_blocks(rows: list[tuple[int, int]], window: int | None) -> None:
    torch.manual_seed(1)
    where = pool()
    full = [
        (torch.randn(start + count, KV_HEADS, DIM), torch.randn(start + count, KV_HEADS, DIM)) for start, count in rows
    ]
    before = [(0, start) for start, _ in rows]
    tables = ragged(rows)
    for row, ((k, v), (_, held)) in enumerate(zip(full, before, strict=True)):  # what earlier steps have written
        for position in range(held):
            block = tables.block_tables[row, position // BLOCK]
            where.keys[1][block, position % BLOCK] = k[position]
            where.values[1][block, position % BLOCK] = v[position]
    q = [torch.randn(count, HEADS, DIM) for _, count in rows]
    new_k = torch.cat([k[start:] for (k, _), (start, _) in zip(full, rows, strict=True)])
    new_v = torch.cat([v[start:] for (_, v), (start, _) in zip(full, rows, strict=True)])

    paged = place(tables, where, torch.device("cpu"))
    got, _ = paged_attention(
        LAYER,
        torch.cat(q).transpose(0, 1)[None],
        new_k.transpose(0, 1)[None],
        new_v.transpose(0, 1)[None],
        None,
        paged=paged,
        scaling=0.3,
        sliding_window=window,
    )
    expected = torch.cat(
        [attend(one, k, v, start, window) for one, (k, v), (start, _) in zip(q, full, rows, strict=True)]
    )
    assert torch.allclose(got[0], expected, atol=1e-5)
    assert paged.calls == [(1, window)]
    assert not where.keys[0].any()  # another layer's blocks stay untouched


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_it_does_not_compute_is_refused_by_name(name: str) -> None:
    paged = place(ragged([(0, 1)]), pool(), torch.device("cpu"))
    q, k = torch.zeros(1, HEADS, 1, DIM), torch.zeros(1, KV_HEADS, 1, DIM)
    with pytest.raises(NotImplementedError, match=name):
        paged_attention(LAYER, q, k, k, None, paged=paged, **{name: torch.ones(1)})
