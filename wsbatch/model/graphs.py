"""CUDA graphs for decode steps: launching hundreds of small kernels one by one would take longer than running them.

A graph replays the same kernels on the same memory, so there is one for each of a few batch sizes, all reading the
same input tensors and sharing the memory of what lies between. A step with fewer rows is filled up with rows that
attend to one token of a spare block.
Not run on a GPU yet: the tests replay by calling the model again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wsbatch.model.attention import PagedBatch, Pool, Varlen
from wsbatch.model.ragged import Ragged

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# Runs a call in a way that can be repeated: what repeats it, and the tensor that each repetition fills.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]


def cuda_capture() -> Capture:
    """Records calls as CUDA graphs that share their memory, each after warming up beside it as torch asks for."""
    memory = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(call: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            output = call()
        return graph.replay, output

    return capture


class DecodeGraphs:
    """Steps of one token a row, every row sampling, replayed from graphs captured when this is made.

    Args:
        logits: (token ids [N], positions [N], kept [N], batch) to logits [N, V], on the device.
        pool: its last block is spare.
        widest: blocks in a row's table at most.
        sizes: numbers of rows to capture, rising.
        capture: None records CUDA graphs.
    """

    def __init__(
        self,
        logits: Callable[[Tensor, Tensor, Tensor, PagedBatch], Tensor | None],
        pool: Pool,
        *,
        widest: int,
        device: torch.device,
        sizes: Sequence[int] = SIZES,
        capture: Capture | None = None,
    ) -> None:
        capture = capture or cuda_capture()
        most = sizes[-1]
        self._pool = pool
        self._spare = pool.keys[0].shape[0] - 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._token_ids, self._positions, self._slots = zeros(most), zeros(most), zeros(most)
        self._kv_lens = zeros(most, dtype=torch.int32)
        self._kv_starts = zeros(most + 1, dtype=torch.int32)
        self._block_tables = zeros(most, widest, dtype=torch.int32)
        starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        kept = torch.arange(most, device=device)
        self._graphs: dict[int, tuple[Callable[[], Any], Tensor]] = {}
        for size in reversed(sizes):  # the largest first: the others find their memory already there
            varlen = Varlen(
                query_starts=starts[: size + 1],
                kv_starts=self._kv_starts[: size + 1],
                kv_lens=self._kv_lens[:size],
                block_tables=self._block_tables[:size],
                max_query=1,
                max_kv=widest * pool.block_tokens,
            )
            paged = PagedBatch(pool, self._slots[:size], None, [], varlen)

            def call(size: int = size, paged: PagedBatch = paged) -> Tensor:
                result = logits(self._token_ids[:size], self._positions[:size], kept[:size], paged)
                assert result is not None  # every row is kept
                return result

            self._fill(self._padding(0, size))
            self._graphs[size] = capture(call)

    def suit(self, ragged: Ragged) -> bool:
        """Whether the step is one token a row, all sampling, and not more rows than were captured."""
        rows = len(ragged.kv_lens)
        return len(ragged.token_ids) == len(ragged.sample_at) == rows <= max(self._graphs)

    def run(self, ragged: Ragged) -> Tensor:
        """The logits of every row, [R, V]: a view that the next call overwrites."""
        rows = len(ragged.kv_lens)
        size = min(size for size in self._graphs if size >= rows)
        padding = self._padding(rows, size)
        last = ragged.positions // self._pool.block_tokens
        blocks = ragged.block_tables[np.arange(rows), last].astype(np.int64)
        slots = blocks * self._pool.block_tokens + ragged.positions % self._pool.block_tokens
        tables = np.zeros((size, self._block_tables.shape[1]), np.int32)
        tables[:rows, : ragged.block_tables.shape[1]] = ragged.block_tables
        tables[rows:, 0] = self._spare
        own: tuple[Any, ...] = (ragged.token_ids, ragged.positions, slots, ragged.kv_lens)
        self._fill((*(np.concatenate(pair) for pair in zip(own, padding[:4], strict=True)), tables))
        replay, output = self._graphs[size]
        replay()
        return output[:rows]

    def _padding(self, rows: int, size: int) -> tuple[Any, ...]:
        """Inputs of the rows from `rows` on: one token, at the start of the spare block."""
        count = size - rows
        nothing = np.zeros(count, np.int64)
        tables = np.full((count, self._block_tables.shape[1]), self._spare, np.int32)
        return nothing, nothing, nothing + self._spare * self._pool.block_tokens, np.ones(count, np.int32), tables

    def _fill(self, inputs: Sequence[Any]) -> None:
        token_ids, positions, slots, kv_lens, tables = inputs
        starts = np.concatenate(([0], np.cumsum(kv_lens))).astype(np.int32)
        targets = (self._token_ids, self._positions, self._slots, self._kv_lens, self._block_tables, self._kv_starts)
        for target, array in zip(targets, (token_ids, positions, slots, kv_lens, tables, starts), strict=True):
            target[: len(array)].copy_(torch.from_numpy(array))
