"""OpenVINO GenAI's continuous batching behind as much of OpenAI's completions API as `wsbatch-bench load` speaks.

OpenVINO's own model server is not on the package index; its engine is. This puts the engine on a socket:

    pip install openvino-genai aiohttp
    python bench/lab/peers/openvino_server.py MODEL_DIR --port 8000 --threads 2

MODEL_DIR is made by `optimum-cli export openvino`. Prompts are token ids, outputs greedy and of exactly `max_tokens`.
Tokens are sent as ids, not made into text: less work than the other servers do, in this one's favour.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from aiohttp import web


def run_engine(frontend: Connection, model: str, threads: int, step_tokens: int) -> None:
    """Step for ever while there is work, in a process of its own: a step holds the interpreter's lock throughout.

    Takes (number, prompt ids, tokens) from the frontend; sends it, once a step, a list of (number, new ids, ended).
    """
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GB
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = step_tokens
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
    frontend.send([])  # loaded
    live: dict[int, Any] = {}
    while True:
        while not live or frontend.poll():
            number, prompt_ids, tokens = frontend.recv()
            prompt = ov.Tensor(np.array([prompt_ids], dtype=np.int64))
            config = genai.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True)
            live[number] = pipeline.add_request(number, prompt, config)
        pipeline.step()
        news = []
        for number, handle in list(live.items()):
            ids = []
            while handle.can_read():
                ids += next(iter(handle.read().values())).generated_ids
            ended = handle.get_status() != genai.GenerationStatus.RUNNING
            if ended:
                del live[number]
            if ids or ended:
                news.append((number, ids, ended))
        frontend.send(news)


class Frontend:
    """The HTTP side."""

    def __init__(self, engine: Connection) -> None:
        self._engine = engine
        self._numbers = count()
        self._streams: dict[int, asyncio.Queue[tuple[list[int], bool]]] = {}

    async def start(self, app: web.Application) -> None:
        """Listen to the engine."""
        asyncio.get_running_loop().add_reader(self._engine.fileno(), self._read)

    def _read(self) -> None:
        try:
            news = self._engine.recv()
        except EOFError:
            raise web.GracefulExit from None
        for number, ids, ended in news:
            self._streams[number].put_nowait((ids, ended))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await request.json()
        number = next(self._numbers)
        stream = self._streams[number] = asyncio.Queue()
        self._engine.send((number, body["prompt"], body["max_tokens"]))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        tokens, ended = 0, False
        while not ended:
            ids, ended = await stream.get()
            tokens += len(ids)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
            event = {"choices": [{"index": 0, "text": "", "token_ids": ids}], "usage": usage}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        del self._streams[number]
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: it is loaded."""
        return web.Response()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=256, help="tokens a step; 256 was fastest")
    args = parser.parse_args()
    os.environ["PYTHONSAFEPATH"] = "1"  # the child is a `python -c`: nothing in the working directory is to run
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=run_engine, args=(there, args.model, args.threads, args.step_tokens), daemon=True).start()
    here.recv()
    frontend = Frontend(here)
    app = web.Application()
    app.router.add_post("/v1/completions", frontend.complete)
    app.router.add_get("/health", frontend.health)
    app.on_startup.append(frontend.start)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)
