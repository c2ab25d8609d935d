"""What `load` puts its load on, by its URL: this server, a peer over HTTP, or the baseline in this process."""

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from wsbatch.cli.parsing import Parser
from wsbatch.client import connect
from wsbatch_bench.cli.flags import THREADS
from wsbatch_bench.load.baseline import open_transformers_target
from wsbatch_bench.load.generator import LoadPlan
from wsbatch_bench.load.http_client import dial_url
from wsbatch_bench.load.openai_target import OpenAiTarget, TextPrompts
from wsbatch_bench.load.target import Target, open_websocket_target
from wsbatch_bench.numbers import BATCH, MILLISECONDS, Number

_BASELINE = "transformers:"


def add_target_flags(parser: Parser) -> None:
    """Add the URL, and what the kinds of targets need to be told."""
    parser.add_argument(
        "url", help="ws(s)://HOST:PORT; http(s)://HOST:PORT/v1/completions of a peer; or transformers:MODEL"
    )
    parser.add_argument(
        "--connections",
        type=Number(0, 10_000, whole=True).flag,
        metavar="N",
        help="number of connections, opened before the load begins "
        "(default: for the requests of half a minute, or all at an infinite rate)",
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument("--model", metavar="NAME", help="http: name of the model on the peer")
    peers.add_argument(
        "--extra-body",
        type=_object,
        metavar="JSON",
        help='http: more fields of each request; null leaves one of ours out: {"min_tokens": null}',
    )
    peers.add_argument(
        "--text-prompts",
        type=_text_prompts,
        default=list,
        metavar="FILE",
        help="http: send text of the same number of tokens by this tokenizer.json, where ids are not taken",
    )
    peers.add_argument(
        "--max-batch-size",
        type=BATCH.flag,
        default=8,
        metavar="N",
        help="transformers: most rows in a batch (default: 8)",
    )
    peers.add_argument(
        "--max-wait-ms",
        type=MILLISECONDS.flag,
        default=0.0,
        metavar="MS",
        help="transformers: longest time that a request is held back while the batch fills up (default: 0)",
    )
    peers.add_argument(
        "--dtype",
        default="auto",
        metavar="TEXT",
        help="transformers: number type that the model computes in, as `wsbatch serve` takes it",
    )
    peers.add_argument(
        "--threads",
        type=THREADS.flag,
        metavar="N",
        help="transformers: CPU threads that the model uses (default: torch's own choice)",
    )


def check_target(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a URL that names no target, or needs another flag."""
    if arguments.url.startswith("http") and arguments.model is None:
        raise ValueError("--model is required for an http URL")
    if not arguments.url.startswith(_BASELINE):
        dial_url(arguments.url)


@asynccontextmanager
async def open_target(arguments: argparse.Namespace, plan: LoadPlan, token: str | None) -> AsyncIterator[Target]:
    """Connect, or load the baseline's model. Raises what that raises."""
    url: str = arguments.url
    if url.startswith(_BASELINE):
        async with open_transformers_target(
            url.removeprefix(_BASELINE),
            dtype=arguments.dtype,
            threads=arguments.threads,
            max_batch_size=arguments.max_batch_size,
            max_wait_ms=arguments.max_wait_ms,
        ) as baseline:
            yield baseline
        return
    dial, host, path = dial_url(url)
    if url.startswith("http"):
        yield OpenAiTarget(
            arguments.model,
            dial=dial,
            host=host,
            path=path,
            auth_token=token,
            extra=arguments.extra_body,
            make_prompt=arguments.text_prompts,
        )
        return
    connections = plan.connections if arguments.connections is None else arguments.connections
    opening = partial(connect, url, auth_token=token)
    async with open_websocket_target(opening, dial=dial, host=host, connections=connections) as target:
        yield target


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be an object, got {text!r}")
    return value


def _text_prompts(text: str) -> TextPrompts:
    try:
        return TextPrompts(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
