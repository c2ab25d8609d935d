"""`wsbatch chat`: a conversation with a running server, in a terminal or through a pipe."""

import argparse
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from wsbatch.cli.lines import PROMPT, STOP, Lines, TypedLines, terminal_restored, typed_so_far
from wsbatch.cli.link import Link, Tell
from wsbatch.cli.output import Pace, while_read
from wsbatch.cli.parsing import Commands, add_parser, text
from wsbatch.cli.screen import Screen, make_screen
from wsbatch.cli.streams import INTERRUPTED, UNREAD
from wsbatch.errors import NeverFits, TooLarge, WsbatchError
from wsbatch.messages import ChatMessage, Event, Finished, GenerateRequest, SamplingParams, Tokens
from wsbatch.nurseries import background_tasks
from wsbatch.wire.fields import WireLimits

_MAX_TOKENS = 512
_MOST_MESSAGES = WireLimits().max_messages

_COMMANDS = f"""\
  /system TEXT   instruct the model, from the next answer on; without TEXT: no longer
  {STOP}          end the answer that is coming (so does Ctrl-C); what has come is kept
  /reset         forget the conversation; the system message stays
  /save FILE     write the conversation: as JSON where FILE ends in .json, else as Markdown
  /help          this list
  /quit          leave (so does Ctrl-D)"""

_DESCRIPTION = """\
Talk to the model of a running server. It is sent the whole conversation each time; where that
no longer fits the model's context, without the oldest questions and their answers, as many as it
takes. The system message stays.

On a terminal, answers are shown as Markdown while they stream, and the prompt has history and
line editing. In a pipe, each line of stdin is a message, one that begins with `/` too; stdout gets
the answers as plain text, and everything else goes to stderr. A lost connection is made again,
and the answer goes on.
"""

_EPILOG = f"""\
in the conversation, on a terminal:
{_COMMANDS}

examples:
  wsbatch chat                                        with the server at {DEFAULT_URL}
  wsbatch chat --url wss://host --system "Answer in one sentence."
  wsbatch chat < questions.txt > answers.txt          one question a line

exit statuses: 0 done; 1 an error, in one line on stderr; 2 bad usage; {INTERRUPTED} Ctrl-C;
{UNREAD} nobody reads stdout any more
"""


def add_command(commands: Commands) -> None:
    """Add `chat` to the command line."""
    parser = add_parser(
        commands, "chat", help="talk to the model of a running server", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--system", type=text, metavar="TEXT", help="instructions to the model")
    parser.add_argument("--plain", action="store_true", help="no Markdown, no colours")
    add_connection_flags(parser)
    add_sampling_flags(
        parser,
        SamplingParams(temperature=0.5, top_p=0.9),
        max_tokens=f"{_MAX_TOKENS}, or half of the model's context where that is less",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of input; the exit status."""
    with ending_with_its_error(), terminal_restored():
        return trio.run(_chat, arguments)


async def _chat(arguments: argparse.Namespace) -> int:
    screen = make_screen(plain=arguments.plain)
    async with background_tasks() as nursery:
        link = Link(nursery, partial(dial, arguments), notify=screen.note)
        chat = Chat(link, screen, sampling_of(arguments), system=arguments.system)
        with on_interrupt(chat.interrupt):
            async with while_read():
                status = await chat.run()
    return status


class Chat:
    """The conversation, and what a line does to it.

    Args:
        link: to the server.
        screen: where answers appear.
        sampling: of every answer.
        system: the first instructions.
    """

    def __init__(self, link: Link, screen: Screen, sampling: SamplingParams, *, system: str | None) -> None:
        self._link = link
        self._screen = screen
        self._sampling = sampling
        self._system = system
        self._turns: list[ChatMessage] = []  # a question, its answer, and so on
        self._left_out = 0  # of them, the oldest: the model is not sent those any more
        self._typed = sys.stdin.isatty() and sys.stdout.isatty()
        self._lines = TypedLines() if self._typed else Lines()
        self._whole = trio.CancelScope()
        self._answering: trio.CancelScope | None = None
        self._warned = False

    async def run(self) -> int:
        """Take lines until they end, or until Ctrl-C; the exit status. In a pipe, errors are raised."""
        with self._whole:
            client = await self._link.client()
            if self._sampling.max_tokens is None:  # leave the other half to the conversation
                most = min(_MAX_TOKENS, client.hello.limits.max_model_len // 2)
                self._sampling = replace(self._sampling, max_tokens=most)
            if self._typed:
                self._screen.note(f"{client.hello.model} at your service; /help lists commands")
            while (line := await self._lines.next()) is not None:
                self._warned = False
                if not line:
                    continue
                if not (self._typed and line.startswith("/")):
                    await self._ask(line)
                elif not self._run_command(*line.partition(" ")[::2]):
                    break
        return INTERRUPTED if self._whole.cancelled_caught else 0

    def interrupt(self) -> None:
        """Ctrl-C: stop the answer; where there is none, leave, at a prompt only when it comes twice."""
        if self._answering is not None:
            self._answering.cancel()
        elif self._typed and not self._warned:
            self._warned = True
            print("\n[once more, or Ctrl-D, to leave]")
            print(PROMPT + typed_so_far(), end="", flush=True)
        else:
            if self._typed:
                print()
            self._whole.cancel()

    def _run_command(self, command: str, rest: str) -> bool:
        """Do what a /command says; False to leave."""
        rest = rest.strip()
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._screen.note(f"commands:\n{_COMMANDS}\n")
            case "/reset":
                self._turns.clear()
                self._left_out = 0
                self._screen.note("the conversation is forgotten")
            case "/system":
                self._system = rest or None
                self._screen.note("system message set" if rest else "no system message")
            case "/save" if rest:
                self._save(rest)
            case "/save":
                self._screen.note("/save needs a file's name")
            case "/stop":
                self._screen.note("no answer is coming")
            case _:
                self._screen.note(f"there is no {command}; /help lists what there is")
        return True

    def _messages(self, *, first: int = 0) -> list[ChatMessage]:
        """The system message, and the conversation from its turn `first` on."""
        return [*([ChatMessage("system", self._system)] if self._system else []), *self._turns[first:]]

    def _save(self, name: str) -> None:
        if name.endswith(".json"):
            turns = [{"role": turn.role, "content": turn.content} for turn in self._messages()]
            content = json.dumps(turns, ensure_ascii=False, indent=2) + "\n"
        else:
            content = "\n".join(f"**{turn.role}**\n\n{turn.content}\n" for turn in self._messages())
        try:
            path = Path(name).expanduser()
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            self._screen.note(f"cannot write {name}: {error.strerror}")
        except RuntimeError:  # of expanduser
            self._screen.note(f"cannot write {name}: there is no such home directory")
        else:
            self._screen.note(f"saved to {path}")

    async def _ask(self, line: str) -> None:
        question = ChatMessage("user", line)
        answer: list[str] = []
        pace = Pace()

        async def tell(event: Event) -> None:
            pace.note(event)
            if isinstance(event, Tokens | Finished) and event.text:
                answer.append(event.text)
                await self._screen.add(event.text)

        problem: str | None = None
        stopped = False
        self._screen.begin()
        try:
            stopped = await self._until_stopped(partial(self._ask_what_fits, question, tell, answer))
        except WsbatchError as error:
            if not self._typed:
                raise
            problem = f"{error} (your message was not kept)"
        finally:
            await self._screen.end()
        if problem is not None:
            self._screen.note(problem)
            return
        if answer:
            self._turns += [question, ChatMessage("assistant", "".join(answer))]
        self._screen.note(f"{pace}, stopped" if stopped else str(pace))

    async def _ask_what_fits(self, question: ChatMessage, tell: Tell, answer: list[str]) -> None:
        """Ask with as much of the conversation as the server takes. `answer` is what has come of an answer.

        Raises what `Link.ask` raises: NeverFits or TooLarge where not even the question fits.
        """
        left_out = self._left_out
        while True:
            messages = (*self._messages(first=self._left_out), question)
            try:
                if len(messages) > _MOST_MESSAGES and self._left_out < len(self._turns):
                    raise TooLarge(f"over {_MOST_MESSAGES} messages")
                await self._link.ask(GenerateRequest(messages=messages, sampling=self._sampling), tell)
                break
            except (NeverFits, TooLarge):
                if answer or self._left_out == len(self._turns):
                    raise
                self._left_out += 2
        if self._left_out > left_out:
            self._screen.note(
                f"the oldest {self._left_out} messages no longer fit: the model is not sent them any more"
            )

    async def _until_stopped(self, ask: Callable[[], Awaitable[None]]) -> bool:
        """Wait for the answer, or for Ctrl-C or /stop; whether it was those. Raises what `ask` raises, as it is."""
        try:
            async with background_tasks() as nursery:
                self._answering = nursery.cancel_scope
                if self._typed:
                    nursery.start_soon(self._lines.watch, nursery.cancel_scope.cancel)
                await ask()
                return False
        finally:
            self._answering = None
        return True
