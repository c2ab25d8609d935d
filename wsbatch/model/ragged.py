"""One step's rows as flat index arrays: what every runner reads, built once a step with a few numpy calls."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wsbatch.steps import PagedStep


@dataclass(frozen=True, slots=True)
class Ragged:
    """A step of R rows and T new tokens, laid end to end without padding.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], position of each token in its own row.
        query_starts: int32 [R + 1], where each row's tokens start in the flat order.
        kv_lens: int32 [R], tokens a row holds once this step's are written.
        block_tables: int32 [R, widest row], KV blocks in order, zero beyond a row's own.
        sample_at: int64 [S], flat index of the token whose logits each sampling row needs, in plan order.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    sample_at: NDArray[np.int64]


def flatten(step: PagedStep, *, block_tokens: int, total_blocks: int) -> Ragged:
    """Lay a plan's rows end to end. Raises ValueError for a row whose blocks do not cover its tokens."""
    rows = step.rows
    lens = np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lens, out=query_starts[1:])
    kv_lens = (starts + lens).astype(np.int32)
    needed = -(-kv_lens // block_tokens)
    block_tables = np.zeros((len(rows), int(needed.max(initial=1))), np.int32)
    for index, row in enumerate(rows):
        count = int(needed[index])
        if not row.token_ids:
            raise ValueError(f"row {row.key}: token_ids is empty; a row computes at least 1 token")
        if len(row.block_table) < count:
            raise ValueError(
                f"row {row.key}: block_table has {len(row.block_table)} blocks of {block_tokens} tokens, "
                f"{int(kv_lens[index])} tokens need {count}"
            )
        block_tables[index, :count] = row.block_table[:count]
    if block_tables.size and not 0 <= int(block_tables.min()) <= int(block_tables.max()) < total_blocks:
        raise ValueError(f"a block number is outside 0..{total_blocks - 1}")
    total = int(query_starts[-1])
    flat = [token for row in rows for token in row.token_ids]
    return Ragged(
        token_ids=np.array(flat, np.int64),
        positions=np.arange(total) + np.repeat(starts - query_starts[:-1], lens),
        query_starts=query_starts,
        kv_lens=kv_lens,
        block_tables=block_tables,
        sample_at=np.array(
            [query_starts[index + 1] - 1 for index, row in enumerate(rows) if row.sampling is not None], np.int64
        ),
    )
