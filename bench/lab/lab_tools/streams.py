"""What the socket costs: the same batches through a server in a process of its own, and in this process without one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import trio

from wsbatch.client import connect
from wsbatch.messages import Finished, GenerateRequest, Tokens
from wsbatch_bench.steps.bare_loop import LoopRequest


@dataclass(frozen=True, slots=True)
class StreamedRun:
    """One run over sockets.

    Attributes:
        tokens, frames: that came; a frame may carry several tokens.
        seconds: from the first request sent to the last terminal frame.
    """

    tokens: int
    frames: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Streamed tokens a second."""
        return self.tokens / self.seconds


async def stream_all(url: str, requests: Sequence[LoopRequest]) -> StreamedRun:
    """Send every request at once, each on a connection of its own that is open beforehand, and read all to the end.

    Raises what the client raises, and ValueError where an output has another length than asked for.
    """
    tokens = frames = 0
    open_connections = 0
    everybody = trio.Event()

    async def ask(request: LoopRequest) -> None:
        nonlocal tokens, frames, open_connections
        async with connect(url) as client:
            open_connections += 1
            if open_connections == len(requests):
                everybody.set()
            await everybody.wait()
            sampling = replace(request.sampling, max_tokens=request.output_tokens, ignore_eos=True)
            async with client.generate(GenerateRequest(token_ids=request.prompt_ids, sampling=sampling)) as stream:
                async for event in stream:
                    if isinstance(event, Tokens):
                        tokens += len(event.token_ids)
                        frames += 1
                    elif isinstance(event, Finished) and event.usage.completion_tokens != request.output_tokens:
                        raise ValueError(
                            f"{event.usage.completion_tokens} tokens came: {request.output_tokens} were asked for"
                        )

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(ask, request)
        await everybody.wait()
        begin_s = trio.current_time()
    return StreamedRun(tokens, frames, trio.current_time() - begin_s)
