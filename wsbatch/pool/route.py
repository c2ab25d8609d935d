"""One request on its way through the pool: from replica to replica if need be, and one stream for its client.

Everything here is synchronous: a frame from a replica goes straight into the client's outbox.
"""

from collections.abc import Callable
from dataclasses import replace

import trio

from wsbatch.client.errors import ProtocolError, error_of
from wsbatch.errors import (
    ConnectionLost,
    Draining,
    EngineDead,
    ModelError,
    QueueFull,
    QueueTimeout,
    RequestError,
    Shed,
    SlowConsumer,
)
from wsbatch.messages import Accepted, Event, Failed, Finished, FinishReason, GenerateRequest, Started, Tokens
from wsbatch.pool.attempt import Attempt
from wsbatch.pool.interface import Pool
from wsbatch.pool.output import Output
from wsbatch.pool.placing import beginnings, estimated_tokens
from wsbatch.pool.replica import Kind, Replica
from wsbatch.pool.suspicion import Suspicion
from wsbatch.stream import Stream

# Refusals that are about the replica and not about the request: another one may take it.
_ELSEWHERE = frozenset({"queue_full", "draining", "engine_dead", "quota", "shed"})

_LONGEST_HOLD_MS = 1000
_ANSWER_S = 1.0  # for a replica to say how a request ended that was cancelled there
_LATE_S = 0.25  # a replica keeps a request's timeout, and knows better how it ended: the pool steps in after this


class Route:
    """One accepted or not yet accepted request of the pool.

    Args:
        pool: finds replicas for it.
        key: the pool's number for it.
        request: what was asked, with the seed set: every attempt uses the same.
        on_event: see `Stream`.

    Attributes:
        stream: the client's.
        attempt: where it is; None while it is held.
        tried: replicas that it was sent to since one last accepted it.
        kind: of the replica that generated its first token; None before that.
        hashes: of its prompt's beginnings.
        decided: set once it is accepted or refused.
        refusal: why it was refused.
        not_before_s: while it is held: when to try again.
        give_up_s: while it is held: when that has lasted too long.
    """

    def __init__(
        self, pool: Pool, key: int, request: GenerateRequest, *, on_event: Callable[[Stream], None] | None
    ) -> None:
        self.key = key
        self.request = request
        self.stream = Stream(request, on_cancel=lambda _: self.end("cancelled"), on_event=on_event)
        self.attempt: Attempt | None = None
        self.tried: set[Replica] = set()
        self.kind: Kind | None = None
        self.hashes = beginnings(request)
        self.decided = trio.Event()
        self.refusal: RequestError | None = None
        self.not_before_s = 0.0
        self.give_up_s: float | None = None
        self._pool = pool
        self._tokens = estimated_tokens(request)
        self._output = Output(request)
        self._suspicion = Suspicion()
        self._started = False  # on the replica where it is
        self._refusals: list[RequestError] = []
        self._ending: FinishReason | None = None
        self._ending_by_s = 0.0
        self._timeout_s: float | None = None
        if request.timeout_ms is not None:
            self._timeout_s = self._output.arrived_s + request.timeout_ms / 1000
            pool.wake_at(self, self._timeout_s + _LATE_S)

    def __repr__(self) -> str:
        where = "held" if self.attempt is None else self.attempt.replica.name
        return f"<Route {self.key} {where}: {len(self._output.token_ids)} tokens>"

    @property
    def waiting(self) -> bool:
        """Accepted, and not known to have started where it is."""
        return self.stream.accepted is not None and not self._started

    def dispatch(self) -> None:
        """Send it to a replica. Where none takes it: refuse it, or hold it if it was accepted before."""
        while (chosen := self._pool.place(self)) is not None:
            self.tried.add(chosen)
            self.attempt, self._started = Attempt(self, chosen, self._asked()), False
            try:
                chosen.begin(self.attempt, tokens=self._tokens)
            except ConnectionLost:
                self.attempt = None
            except RequestError as error:
                self.attempt = None
                if error.code not in _ELSEWHERE:
                    self.fail(error)
                    return
                self._refusals.append(error)
            else:
                return
        refusals, self._refusals = self._refusals, []
        self.tried.clear()
        retries = [error.retry_after_ms for error in refusals if error.retry_after_ms is not None]
        retry_after_ms = max(50, min(retries, default=500))
        if self.stream.accepted is not None:
            # It was let in before those who are told to come back, and does not wait behind them.
            self._pool.hold(self, retry_after_ms=min(retry_after_ms, _LONGEST_HOLD_MS))
        elif refusals:
            self.fail(QueueFull(f"no replica has room: {refusals[0].message}", retry_after_ms=retry_after_ms))
        else:
            self.fail(self._pool.refusal() or QueueFull("no replica has room", retry_after_ms=retry_after_ms))

    def deliver(self, event: Event) -> None:
        """Take an event of the attempt. Raises ProtocolError where tokens are missing or too many."""
        match event:
            case Tokens():
                self._tokens_came(event)
            case Accepted():
                self._accepted(event)
            case Started():
                self._start()
            case Finished():
                self._finished(event)
            case Failed():
                self._failed(event)

    def lost(self, why: str) -> None:
        """The replica is gone. Go on elsewhere, unless this request looks like the cause of it."""
        self.attempt = None
        if self._ending is not None:
            self._finish(self._ending)
        elif self._suspicion.lost(started=self._started, tokens=len(self._output.token_ids)):
            self.fail(ModelError(f"replicas were lost one after another while they had this request: {why}"))
        else:
            self._move()

    def end(self, reason: FinishReason) -> None:
        """End it, with this reason. Where it is on a replica, that one still has the text that was held back."""
        if self.stream.accepted is None:
            self.fail(Draining("the router is shutting down", retry_after_ms=1000))
        elif self.attempt is None or not self.attempt.accepted:
            self._leave()
            self._finish(reason)
        elif self._ending is None:
            self._ending, self._ending_by_s = reason, trio.current_time() + _ANSWER_S
            self.attempt.replica.cancel(self.attempt)
            self._pool.wake_at(self, self._ending_by_s)

    def vacate(self) -> None:
        """Its replica is let go of in good order, which nobody is to blame for: go on elsewhere. Where no other replica
        may, it ends with `shutdown`."""
        if self.kind is not None and not self._pool.has(self.kind):
            self.end("shutdown")
        elif self._ending is None:
            self._leave()
            self._move()

    def drop(self) -> None:
        """Nobody wants it any more, and nobody has seen it accepted."""
        self._leave()
        self._pool.ended(self)

    def fail(self, error: RequestError) -> None:
        """Refuse it, or end it with an error if it was accepted."""
        self._leave()
        if self.stream.accepted is None:
            self.refusal = error
            self.decided.set()
        else:
            self.stream.fail(error)
        self._pool.ended(self)

    def wake(self) -> None:
        """A time it asked for has come; perhaps one that means nothing any more."""
        now_s = trio.current_time()
        if self._ending is not None:
            if now_s >= self._ending_by_s:
                self._leave()
                self._finish(self._ending)
        elif self.give_up_s is not None and now_s >= self.give_up_s:
            self.give_up()
        elif self._timeout_s is not None and now_s >= self._timeout_s:
            if self.attempt is None and self._output.first_token_s is None:
                self.fail(QueueTimeout("the request's whole timeout ran out before a replica began it"))
            else:
                self.end("timeout")

    def give_up(self) -> None:
        """No replica can go on with it."""
        self.fail(ModelError("its replica was lost, and no other one with the same weights could go on with it"))

    def _asked(self) -> GenerateRequest:
        """What the next replica is asked: to go on from here, within the time that is left. Always streaming, so that
        what one replica has generated is not lost with it."""
        request = self.request
        spent_ms = round((trio.current_time() - self._output.arrived_s) * 1000)
        # Once it has run it is not to be told that it waited too long.
        queue_timeout_ms = None if self._output.first_token_s is not None else request.queue_timeout_ms
        return replace(
            request,
            stream=True,
            resume_token_ids=tuple(self._output.token_ids),
            timeout_ms=None if request.timeout_ms is None else max(1, request.timeout_ms - spent_ms),
            queue_timeout_ms=None if queue_timeout_ms is None else max(1, queue_timeout_ms - spent_ms),
        )

    def _accepted(self, event: Accepted) -> None:
        assert self.attempt is not None
        self.attempt.accepted = True
        self.tried.clear()
        self._refusals.clear()
        self.give_up_s = None
        if self.stream.accepted is None:
            self.stream.accept(replace(event, id=self.request.id))
            self.decided.set()

    def _start(self) -> None:
        self._started = True
        self._output.started()
        self.stream.start()

    def _tokens_came(self, event: Tokens) -> None:
        assert self.attempt is not None
        held = len(self._output.token_ids)
        if event.index != held or held + len(event.token_ids) > self.request.sampling.most_tokens:
            raise ProtocolError(f"token {held} was due, got {len(event.token_ids)} from {event.index} on")
        if self.kind is None:
            self.kind = self.attempt.replica.kind
        if not self._started:
            self._start()
        self._output.add(event)
        if not self.request.stream:
            return
        self.stream.push(list(event.token_ids), event.text, list(event.logprobs or ()))
        if self.stream.overdue(bound := self._pool.max_unread_tokens, trio.current_time()):
            self.fail(SlowConsumer(f"more than {bound} tokens are unread, the most allowed"))

    def _finished(self, event: Finished) -> None:
        self.attempt = None
        if event.finish_reason not in ("cancelled", "shutdown"):
            self._finish(event.finish_reason, event)
        elif self._ending is not None:
            self._finish(self._ending, event)
        else:
            # The replica's own doing: it is being stopped. What it held back is held back by the next one too.
            self._move(event)

    def _failed(self, event: Failed) -> None:
        attempt, error = self.attempt, error_of(event)
        assert attempt is not None
        if attempt.accepted and event.code == EngineDead.code:
            self.lost(event.message)
            return
        self.attempt = None
        self.tried.add(attempt.replica)
        if self._ending is not None:
            self._finish(self._ending)
        elif event.code not in _ELSEWHERE or (event.code == Shed.code and self._pool.place(self) is None):
            self.fail(error)
        else:
            self._refusals.append(error)
            self.dispatch()

    def _move(self, last: Finished | None = None) -> None:
        """To another replica. `last` is how the one before ended it: told where no other can go on with it."""
        if self.kind is None or self._pool.has(self.kind):
            self._started = False
            self._pool.moved(self)
            self.dispatch()
        elif last is not None:
            self._finish(last.finish_reason, last)
        else:
            self.give_up()

    def _leave(self) -> None:
        if self.attempt is not None:
            self.attempt.replica.abandon(self.attempt)
            self.attempt = None

    def _finish(self, reason: FinishReason, last: Finished | None = None) -> None:
        """The terminal event; `last` is the replica's, where it has told one."""
        assert self.stream.accepted is not None
        prompt_tokens, tail = self.stream.accepted.prompt_tokens, "" if last is None else last.text
        self.stream.finish(self._output.finished(reason, prompt_tokens=prompt_tokens, tail=tail, last=last))
        self._pool.ended(self)
