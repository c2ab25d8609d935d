"""What an engine writes of one request: its events, merged until they are taken, and exactly one terminal one.

Writing (`accept`, `start`, `push`, `finish`, `fail`) never waits: what the consumer has not taken is merged into one
`Tokens` event, bounded by the request's own max_tokens. `Stream` is the consumer's side of it.
"""

from wsbatch.errors import RequestError
from wsbatch.messages import (
    Accepted,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Started,
    Terminal,
    TokenLogprobs,
    Tokens,
)

_SLOW_S = 2.0


class Outbox:
    """The events of one request, in order: `Accepted`, any number of `Tokens`, one `Finished` or `Failed`.

    Args:
        request: what was asked.

    Attributes:
        key: the engine's own number for the request; 0 until it is accepted.
        started: whether its first step has begun.
        tell_start: whether that is an event (`Started`): set it before the first step.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.key = 0
        self.accepted: Accepted | None = None
        self.terminal: Terminal | None = None
        self.started = False
        self.tell_start = False
        self._accepted_taken = False
        self._start_taken = False
        self._terminal_taken = False
        # The outbox: tokens pushed and not yet taken.
        self._index = len(request.resume_token_ids)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._over_since_s: float | None = None  # more tokens unread than are allowed, since the last `take`

    def __repr__(self) -> str:
        state = "new" if self.accepted is None else "live" if self.terminal is None else "ended"
        return f"<{type(self).__name__} {self.request.id!r} {state}, {self.unsent_tokens} unsent>"

    @property
    def live(self) -> bool:
        """Whether the terminal event is still to come."""
        return self.terminal is None

    @property
    def unsent_tokens(self) -> int:
        """Tokens pushed and not yet taken."""
        return len(self._token_ids)

    def overdue(self, max_tokens: int, now_s: float) -> bool:
        """Whether the consumer is slow: it has left more tokens than this unread for two seconds, and taken nothing.

        Ask after each `push`. Not slow is a writer that merges what comes within `frame_interval_ms`, however much.
        """
        if len(self._token_ids) <= max_tokens:
            return False
        if self._over_since_s is None:
            self._over_since_s = now_s
        return now_s - self._over_since_s > _SLOW_S

    def accept(self, accepted: Accepted) -> None:
        """The request has its place in the queue."""
        self.accepted = accepted
        self._notify()

    def start(self) -> None:
        """The request's first step begins. Calls after the first are ignored."""
        if not self.started:
            self.started = True
            if self.tell_start:
                self._notify()

    def push(self, token_ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
        """Add tokens to the outbox. `logprobs` is empty where none were asked for, else as long as `token_ids`."""
        was_empty = not self._token_ids and not self._text
        self._token_ids += token_ids
        if text:
            self._text.append(text)
        self._logprobs += logprobs
        if was_empty:
            self._notify()

    def finish(self, finished: Finished) -> None:
        """End the request; what it had pushed is still delivered first. Calls after the first are ignored."""
        self._end(finished)

    def fail(self, error: RequestError) -> None:
        """End the request with an error. Calls after the first terminal are ignored."""
        self._end(Failed.of(self.request.id, error))

    def take(self) -> list[Event]:
        """All that happened since the last call, tokens merged into at most one `Tokens`. Never waits."""
        events: list[Event] = []
        if self.accepted is not None and not self._accepted_taken:
            self._accepted_taken = True
            events.append(self.accepted)
        if self.started and self.tell_start and not self._start_taken:
            self._start_taken = True
            events.append(Started(self.request.id))
        if self._token_ids or self._text:
            logprobs = tuple(self._logprobs) if self._logprobs else None
            events.append(Tokens(self.request.id, self._index, tuple(self._token_ids), "".join(self._text), logprobs))
            self._index += len(self._token_ids)
            self._token_ids, self._text, self._logprobs = [], [], []
            self._over_since_s = None
        if self.terminal is not None and not self._terminal_taken:
            self._terminal_taken = True
            events.append(self.terminal)
        return events

    def _end(self, terminal: Terminal) -> None:
        if self.terminal is None:
            self.terminal = terminal
            self._notify()

    def _notify(self) -> None:
        """There is something to take, where there was nothing of its kind."""
