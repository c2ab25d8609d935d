"""The baseline: transformers' own `generate` on padded batches, in this process, with the same two knobs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import trio

from wsbatch.messages import SamplingParams
from wsbatch.nurseries import background_tasks
from wsbatch_bench.load.record import Record


@dataclass(slots=True)
class _Waiting:
    record: Record
    prompt_ids: tuple[int, ...]
    start_s: float
    arrived_s: float
    done: trio.Event = field(default_factory=trio.Event)

    def take(self, now_s: float) -> None:
        """One more token, if one is still wanted."""
        record = self.record
        if record.error is None and record.tokens < record.output_tokens:
            record.arrivals.append((now_s - self.start_s, 1))
            if record.tokens == record.output_tokens:
                record.ended_s = now_s - self.start_s
                record.reported_tokens = record.output_tokens
                self.done.set()


class TransformersTarget:
    """What one would write first: wait for a batch or for the oldest's time to be up, pad, `generate`, repeat.

    Its tokens are seen as they come, through `generate`'s streamer. There is no socket, which is in its favour; the
    load generator shares its process, which is not.
    """

    backend = "transformers"

    def __init__(self, module: Any, model: str, *, max_batch_size: int, max_wait_s: float) -> None:
        self.model = model
        self._module = module
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._send, self._receive = trio.open_memory_channel[_Waiting](inf)

    async def send(self, record: Record, prompt_ids: tuple[int, ...], start_s: float) -> None:
        """See `Target.send`."""
        now_s = trio.current_time()
        record.sent_s = now_s - start_s
        waiting = _Waiting(record, prompt_ids, start_s, now_s)
        self._send.send_nowait(waiting)
        await waiting.done.wait()

    async def totals(self) -> None:
        """There is no server to count."""
        return

    async def run(self) -> None:
        """Serve until cancelled; the batch in flight is waited for."""
        while True:
            batch = [await self._receive.receive()]
            while len(batch) < self._max_batch_size:
                try:
                    batch.append(self._receive.receive_nowait())
                except trio.WouldBlock:
                    with trio.move_on_at(batch[0].arrived_s + self._max_wait_s) as patience:
                        batch.append(await self._receive.receive())
                    if patience.cancelled_caught:
                        break
            await trio.to_thread.run_sync(self._generate, batch, trio.lowlevel.current_trio_token())

    def _generate(self, batch: list[_Waiting], token: trio.lowlevel.TrioToken) -> None:
        import torch

        width = max(len(each.prompt_ids) for each in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)  # [B, T]
        mask = torch.zeros_like(ids)
        for row, each in enumerate(batch):
            ids[row, width - len(each.prompt_ids) :] = torch.tensor(each.prompt_ids)
            mask[row, width - len(each.prompt_ids) :] = 1

        def deliver() -> None:
            now_s = trio.current_time()
            for each in batch:
                each.take(now_s)

        with torch.inference_mode():
            self._module.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(each.record.output_tokens for each in batch),
                **_choice(batch[0].record.sampling),
                eos_token_id=None,
                pad_token_id=0,
                streamer=_Streamer(lambda: token.run_sync_soon(deliver)),
            )


def _choice(sampling: SamplingParams) -> dict[str, Any]:
    """As `generate` spells it: one for all rows."""
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}


class _Streamer:
    """What `generate` calls with the prompt first, and then with each step's tokens."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._begun = False

    def put(self, value: Any) -> None:
        """A step is done."""
        if self._begun:
            self._step()
        self._begun = True

    def end(self) -> None:
        """The batch is done."""


@asynccontextmanager
async def open_transformers_target(
    model: str, *, dtype: str, threads: int | None, max_batch_size: int, max_wait_ms: float
) -> AsyncIterator[TransformersTarget]:
    """Load the model and serve the target while the block runs. Raises what loading raises."""
    from wsbatch.model.loading import load

    loaded = await trio.to_thread.run_sync(lambda: load(model, dtype=dtype, threads=threads))
    target = TransformersTarget(loaded.model, model, max_batch_size=max_batch_size, max_wait_s=max_wait_ms / 1000)
    async with background_tasks() as nursery:
        nursery.start_soon(target.run)
        yield target
