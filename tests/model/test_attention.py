"""Paged attention in plain torch against attention written out row by row."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen

from wsbatch.messages import SamplingParams
from wsbatch.model.attention import Pool, paged_attention, place
from wsbatch.model.graphs import DecodeGraphs
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


def as_documented(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    max_query: int,
    max_kv: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What the documentation of `torch.nn.attention.varlen.varlen_attn` says, which itself runs on CUDA only."""
    assert num_splits == 1  # more than one is wrong with a block table: pytorch issue 194167
    assert enable_gqa
    assert scale == 0.3
    # Where a row has one query, seeing all and being causal are the same; without a window the first is faster.
    assert window_size == (-1, -1) if max_query == 1 and window_size[0] < 0 else window_size[1] == 0
    assert int(query_starts.diff().max()) <= max_query
    assert int(seqused_k.max()) <= max_kv
    assert kv_starts.diff().tolist() == seqused_k.tolist()
    assert all(t.dtype == torch.int32 for t in (query_starts, kv_starts, seqused_k, block_table))
    out = torch.empty_like(q)
    for row, used in enumerate(seqused_k.tolist()):
        begin, end = query_starts[row : row + 2].tolist()
        k, v = (cache[block_table[row].long()].flatten(0, 1)[:used] for cache in (keys, values))
        window = None if window_size[0] < 0 else window_size[0] + 1
        out[begin:end] = attend(q[begin:end], k, v, used - (end - begin), window)
    return out


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 9)], [(6, 1), (0, 3), (11, 1), (5, 8), (3, 1)]])
def test_each_row_attends_over_its_own_blocks(
    rows: list[tuple[int, int]], window: int | None, varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", as_documented)
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

    paged = place(tables, where, torch.device("cpu"), varlen=varlen)
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


def test_graphs_of_a_few_sizes_serve_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of attention stands for the model; a replay calls it again and fills the captured output."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", as_documented)
    torch.manual_seed(2)
    table = torch.randn(50, HEADS, DIM)

    def logits(token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, paged: Any) -> torch.Tensor:
        x = (table[token_ids] + positions[:, None, None]).transpose(0, 1)[None]  # [1, H, N, D]
        out, _ = paged_attention(LAYER, x, x[:, :KV_HEADS], x[:, :KV_HEADS], None, paged=paged, scaling=0.3)
        return out[0].flatten(1)[keep]

    def repeat(call: Any) -> tuple[Any, torch.Tensor]:
        output = call().clone()
        return lambda: output.copy_(call()), output

    where, plain = pool(), pool()
    graphs = DecodeGraphs(logits, where, widest=5, device=torch.device("cpu"), sizes=(1, 2, 4), capture=repeat)
    for positions in ([0, 0, 0], [1, 1], [2], [2, 1, 1, 0]):
        tables = [(0, 3), (2, 9), (11, 4), (6, 8)]
        rows = [
            PagedRow(key, (10 * key + position + 1,), position, tables[key], SamplingParams())
            for key, position in enumerate(positions)
        ]
        step = flatten(PagedStep(tuple(rows)), block_tokens=BLOCK, total_blocks=BLOCKS - 1)
        assert graphs.suit(step)
        got = graphs.run(step)
        paged = place(step, plain, torch.device("cpu"))
        flat = [torch.from_numpy(array) for array in (step.token_ids, step.positions, step.sample_at)]
        assert torch.allclose(got, logits(*flat, paged), atol=1e-5)
    five = [PagedRow(key, (1,), 0, (key,), SamplingParams()) for key in range(5)]
    chunk = PagedRow(0, (1, 2), 0, (0,), SamplingParams())
    silent = PagedRow(0, (1,), 0, (0,), None)
    for rows in (five, [chunk], [silent]):
        assert not graphs.suit(flatten(PagedStep(tuple(rows)), block_tokens=BLOCK, total_blocks=BLOCKS))
