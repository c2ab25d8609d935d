"""`wsbatch generate`: one request to a running server, streamed to stdout."""

import argparse
import sys

import trio

from wsbatch.cli.asking import (
    DEFAULT_URL,
    add_connection_flags,
    add_sampling_flags,
    dial,
    ending_with_its_error,
    on_interrupt,
    sampling_of,
)
from wsbatch.cli.output import while_read, write_json, write_text
from wsbatch.cli.parsing import Commands, add_parser
from wsbatch.cli.streams import INTERRUPTED, UNREAD, read_stdin
from wsbatch.client import TokenStream
from wsbatch.errors import Draining, RequestError
from wsbatch.messages import DEFAULT_MAX_TOKENS, ChatMessage, Failed, GenerateRequest, SamplingParams, ServerMessage
from wsbatch.wire import JSON

_RETRIES = 5

_DESCRIPTION = """\
Send one prompt to a running server and write the text to stdout as it arrives.

Where stderr is a terminal, one line there tells tokens, time to first token (TTFT) and speed.
A refusal that says when to try again (a full queue) is retried a few times. Ctrl-C cancels.
"""

_EPILOG = f"""\
examples:
  wsbatch generate "Once upon a time"                 from the server at {DEFAULT_URL}
  wsbatch generate --chat "Why is the sky blue?"      as a question, by the model's chat template
  wsbatch generate --url wss://host:443 --max-tokens 64 --temperature 0.8 --seed 1 "A poem:"
  cat notes.txt | wsbatch generate -                  the prompt from stdin
  wsbatch generate --json "Hi" | jq -r .type          the server's frames, one JSON map a line

exit statuses: 0 done; 1 an error, in one line on stderr; 2 bad usage; {INTERRUPTED} Ctrl-C;
{UNREAD} nobody reads stdout any more
"""


def add_command(commands: Commands) -> None:
    """Add `generate` to the command line."""
    parser = add_parser(
        commands,
        "generate",
        help="stream one completion from a running server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("prompt", help="the text to go on from; `-` reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, not text to continue")
    parser.add_argument("--json", action="store_true", help="print the server's frames as JSON, one a line")
    add_connection_flags(parser)
    most = f"{DEFAULT_MAX_TOKENS}, or what is left of the model's context"
    add_sampling_flags(parser, SamplingParams(), max_tokens=most)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask and print; the exit status."""
    with ending_with_its_error():
        prompt = read_stdin() if arguments.prompt == "-" else arguments.prompt
        return trio.run(_generate, arguments, prompt)


async def _generate(arguments: argparse.Namespace, prompt: str) -> int:
    sampling = sampling_of(arguments)
    request = (
        GenerateRequest(messages=(ChatMessage("user", prompt),), sampling=sampling)
        if arguments.chat
        else GenerateRequest(prompt=prompt, sampling=sampling)
    )
    with trio.CancelScope() as scope, on_interrupt(scope.cancel):
        async with while_read(), dial(arguments, retries=_RETRIES) as client:
            if arguments.json:
                await _write_frame(client.hello)
            async with client.generate(request, retries=_RETRIES) as stream:
                await (_print_frames(stream) if arguments.json else _print_text(stream))
    return INTERRUPTED if scope.cancelled_caught else 0


async def _print_text(stream: TokenStream) -> None:
    finished, pace = await write_text(stream, end_line=sys.stdout.isatty())
    if sys.stderr.isatty():
        print(f"[{pace}]", file=sys.stderr)
    if finished.finish_reason == "shutdown":
        raise Draining("the server shut down before the text was complete")


async def _print_frames(stream: TokenStream) -> None:
    try:
        async for event in stream:
            await _write_frame(event)
    except RequestError as error:
        await _write_frame(Failed.of(stream.request.id, error))
        raise


async def _write_frame(message: ServerMessage) -> None:
    await write_json(str(JSON.encode_server(message)))
