"""One request on its way through the pool: from replica to replica if need be, and one stream for its client.

Everything here is synchronous: a frame from a replica goes straight into the client's outbox.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import get_args

import trio

from wsbatch.client.errors import error_of
from wsbatch.engine.stream import Stream
from wsbatch.errors import (
    BY_CODE,
    BadRequest,
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
from wsbatch.pool.deadlines import Deadlines
from wsbatch.pool.interface import Pool
from wsbatch.pool.output import Output
from wsbatch.pool.placing import beginnings, estimated_tokens
from wsbatch.pool.replica import Blame, Kind, Replica
from wsbatch.pool.search import LARGER, RETRY_MS, Search
from wsbatch.pool.suspicion import INNOCENT_TOKENS, Mishap, Suspicion

# Errors that are about the request, wherever it is sent.
_FINAL = frozenset(error.code for error in (BadRequest, QueueTimeout)) | LARGER

_ANSWER_S = 1.0  # for a replica to say how a request ended that was cancelled there
# Before one of those that may have broken a connection is sent on, about so long, each another time: it is alone then
# if it breaks the next one.
_APART_S = 0.25
_LONGEST_HOLD_S = 1.0
_RETRY_S = 0.05  # before a replica that has just failed to take a request is asked again


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
        search: for a replica that takes it.
        kind: of the replica that generated its first token; None before that.
        hashes: of its prompt's beginnings.
        decided: set once it is accepted or refused.
        refusal: why it was refused.
        not_before_s: while it is held: when to try again.
    """

    def __init__(
        self, pool: Pool, key: int, request: GenerateRequest, *, on_event: Callable[[Stream], None] | None
    ) -> None:
        self.key = key
        self.request = request
        self.stream = Stream(request, on_cancel=lambda _: self.end("cancelled"), on_event=on_event)
        self.attempt: Attempt | None = None
        self.search = Search(request)
        self.kind: Kind | None = None
        self.hashes = beginnings(request)
        self.decided = trio.Event()
        self.refusal: RequestError | None = None
        self.not_before_s = 0.0
        self._pool = pool
        self._tokens = estimated_tokens(request)
        self._output = Output(request)
        self._suspicion = Suspicion()
        self._started = False  # on the replica where it is
        self._ending: FinishReason | None = None
        self._deadlines = Deadlines(request, pool.config, pool.clock)
        self._arm()

    def __repr__(self) -> str:
        where = "held" if self.attempt is None else self.attempt.replica.name
        return f"<Route {self.key} {where}: {len(self._output.token_ids)} tokens>"

    @property
    def waiting(self) -> bool:
        """Accepted, and not known to have started where it is."""
        return self.stream.accepted is not None and not self._started

    def dispatch(self, last: RequestError | None = None) -> None:
        """Send it to a replica. Where none takes it: hold it if it was accepted before, or if a replica has just been
        lost with it; else refuse it. `last`: fail with this instead."""
        while (chosen := self._pool.place(self)) is not None:
            self.search.tried.add(chosen)
            attempt, self._started = Attempt(self, chosen, self._asked()), False
            try:
                chosen.begin(attempt, tokens=self._tokens)
            except ConnectionLost:
                continue
            except RequestError as error:
                if not self._refused_by(chosen, error, was_sent=False):
                    self.fail(error)
                    return
            else:
                self.attempt = attempt
                self._deadlines.sent()
                self._arm()
                return
        if last is not None:
            self.fail(last)
        else:
            self._find_no_place()

    def deliver(self, event: Event) -> None:
        """Take an event of the attempt: in order, as the client has seen to."""
        match event:
            case Tokens():
                self._tokens_came(event)
            case Accepted():
                self._accepted(event)
            case Started():
                self._deadlines.started()
                self._start()
            case Finished():
                self._finished(event)
            case Failed():
                self._failed(event)

    def lost(self, why: str, blame: Blame | None, *, with_replica: bool) -> None:
        """The replica is gone, or the connection. Go on elsewhere, unless this request looks like the cause of it."""
        mishap: Mishap = "killed" if self._started else "lost"
        if not with_replica:
            mishap = "moved" if blame is None else "cut"
        error = ModelError(f"replicas were lost one after another while they had this request: {why}")
        self._go_on(mishap, blame, error)

    def broken(self, why: str) -> None:
        """The replica broke the protocol."""
        assert self.attempt is not None
        self._go_on("failed", Blame(self.attempt.replica), ModelError(f"replicas gave no valid answer: {why}"))

    def end(self, reason: FinishReason) -> None:
        """End it, with this reason. Where it is on a replica that has given text, that one may still have some which
        was held back: it has a second to say so. Asked twice, it ends at once."""
        has_text = self.attempt is not None and self.attempt.accepted and self._output.token_ids
        if self.attempt is None or not has_text or self._ending is not None:
            self.end_now(reason)
        else:
            self._ending, self._deadlines.ending_by_s = reason, trio.current_time() + _ANSWER_S
            self.attempt.replica.cancel(self.attempt)
            self._arm()

    def end_now(self, reason: FinishReason) -> None:
        """End it, without a word from its replica."""
        if self.stream.accepted is not None:
            self._leave()
            self._finish(self._ending or reason)
        elif reason == "timeout":
            self.fail(QueueTimeout("the request's whole timeout ran out before a replica accepted it"))
        else:
            self.fail(Draining("the router is shutting down", retry_after_ms=1000))

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
        self._deadlines.armed_s = inf
        begun = self._started or self._output.first_token_s is not None
        match self._deadlines.due(begun=begun):
            case "end":
                self.end_now("cancelled")
            case "give up":
                self.give_up()
            case "time out" if self.attempt is None and not begun:
                self.fail(QueueTimeout("the request's whole timeout ran out before a replica began it"))
            case "time out":
                self.end("timeout")
            case "time out in the queue":
                self.fail(QueueTimeout("the request waited in the queue for its whole queue timeout"))
            case "move":
                self._stalled()
            case None:
                pass
        if self.stream.live and self.refusal is None:
            self._arm()

    def give_up(self) -> None:
        """No replica can go on with it, or take it."""
        if self.stream.accepted is not None:
            self.fail(ModelError("its replica was lost, and no other one with the same weights could go on with it"))
        else:
            self._refuse(self._pool.refusal() or QueueFull("no replica has room", retry_after_ms=RETRY_MS))

    def _arm(self) -> None:
        """Be woken in time."""
        if (next_s := self._deadlines.next_s) < self._deadlines.armed_s:
            self._deadlines.armed_s = next_s
            self._pool.wake_at(self, next_s)

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

    def _refused_by(self, replica: Replica, error: RequestError, *, was_sent: bool) -> bool:
        return self.search.refused(
            replica, error, was_sent=was_sent, fits_elsewhere=partial(self._pool.fits_elsewhere, self)
        )

    def _find_no_place(self) -> None:
        refusal = self.search.give_up()
        if self.stream.accepted is None and (refusal is not None or not self._suspicion.faults):
            self._refuse(refusal or self._pool.refusal() or QueueFull("no replica has room", retry_after_ms=RETRY_MS))
            return
        # It was let in before those who are told to come back, and does not wait behind them.
        self._hold(_RETRY_S if refusal is None else min((refusal.retry_after_ms or 0) / 1000, _LONGEST_HOLD_S))

    def _hold(self, retry_s: float) -> None:
        """No replica has it for so long at least."""
        config, now_s = self._pool.config, trio.current_time()
        patience_s = config.accept_timeout_s if self.stream.accepted is None else config.resume_timeout_s
        self.not_before_s = now_s + retry_s
        self._deadlines.give_up_s = min(self._deadlines.give_up_s, now_s + patience_s)
        self._pool.hold(self)
        self._arm()

    def _refuse(self, error: RequestError) -> None:
        """Refuse it; but what has befallen replica after replica is not to be tried again."""
        if self._suspicion.faults > 1:
            error = ModelError("replicas were lost, or failed, one after another while they had this request")
        self.fail(error)

    def _accepted(self, event: Accepted) -> None:
        assert self.attempt is not None
        self.attempt.accepted = True
        self.search.found()
        self._deadlines.accepted()
        self._arm()
        if self.stream.accepted is None:
            assert self.request.sampling.seed is not None
            self.stream.accept(replace(event, id=self.request.id, seed=self.request.sampling.seed))
            self.decided.set()

    def _start(self) -> None:
        self._started = True
        self._output.started()
        self.stream.start()

    def _tokens_came(self, event: Tokens) -> None:
        assert self.attempt is not None
        if self.kind is None:
            self.kind = self.attempt.replica.kind
        if not self._started:
            self._start()
        self._deadlines.got(len(event.token_ids))
        self._output.add(event)
        if self.attempt.tokens - len(event.token_ids) < INNOCENT_TOKENS <= self.attempt.tokens:
            self._done_by(self.attempt)
        if not self.request.stream:
            return
        self.stream.push(list(event.token_ids), event.text, list(event.logprobs or ()))
        if self.stream.overdue(bound := self._pool.config.max_unread_tokens, self._pool.clock.now_s()):
            self.fail(SlowConsumer(f"more than {bound} tokens are unread, the most allowed"))

    def _done_by(self, attempt: Attempt) -> None:
        attempt.replica.health.succeeded(attempt.sent_s)
        self._suspicion.cleared(attempt.replica)

    def _finished(self, event: Finished) -> None:
        attempt = self.attempt
        assert attempt is not None
        if event.finish_reason in ("cancelled", "shutdown"):
            if self._ending is not None:
                self._finish(self._ending, event)
            else:
                self._stopped(attempt, event)
        elif event.finish_reason not in get_args(FinishReason):
            self.broken("it finished for a reason that is none")
        elif event.finish_reason == "timeout" and self.request.timeout_ms is None:
            self.broken("it ran out of a time that it was not given")
        else:
            if event.finish_reason != "timeout":
                self._done_by(attempt)
            self._finish(event.finish_reason, event)

    def _stopped(self, attempt: Attempt, event: Finished) -> None:
        """The replica's own doing: it is being stopped. What it held back is held back by the next one too."""
        self.attempt = None
        self.search.tried.add(attempt.replica)
        blame = None if attempt.replica.draining else Blame(attempt.replica)
        if self._suspicion.note("moved", blame, tokens=len(self._output.token_ids)):
            self._finish("shutdown", event)
        else:
            self._move(event)

    def _failed(self, event: Failed) -> None:
        attempt, error = self.attempt, error_of(event)
        assert attempt is not None
        self.search.tried.add(attempt.replica)
        if self._ending is not None:
            self._finish(self._ending)
        elif attempt.accepted and event.code == EngineDead.code:
            self.lost(event.message, Blame(attempt.replica), with_replica=True)
        elif (
            event.code == SlowConsumer.code
        ):  # this router's doing, not the client's, of which the replica knows nothing
            self._go_on("moved", None, error)
        elif event.code == Shed.code:
            self.attempt = None
            self.dispatch(error)
        elif self._refused_by(attempt.replica, error, was_sent=True):
            self.attempt = None
            self.dispatch()
        elif event.code in _FINAL:
            self.fail(error)
        else:
            known = event.code in BY_CODE
            said = error.message if known else f"a replica answered with an unknown error: {error.message}"
            self._go_on("failed", Blame(attempt.replica), ModelError(said))

    def _stalled(self) -> None:
        """Its replica says too little of it."""
        attempt = self.attempt
        assert attempt is not None
        what = "went on with" if attempt.accepted else "answered"
        self._leave()
        error = ModelError(f"no replica {what} this request in time, one after another")
        self._go_on("failed", Blame(attempt.replica), error, on=attempt)

    def _go_on(self, mishap: Mishap, blame: Blame | None, error: RequestError, *, on: Attempt | None = None) -> None:
        """Something befell it where it was: go on elsewhere, unless that has been so too often: then fail with this."""
        attempt, self.attempt = on or self.attempt, None
        assert attempt is not None
        self.search.tried.add(attempt.replica)
        self._deadlines.left()
        if self._ending is not None:
            self._finish(self._ending)
        elif self._suspicion.note(mishap, blame, tokens=len(self._output.token_ids)):
            self.fail(error)
        else:
            self._move(pause_s=random.uniform(0.5, 1.5) * _APART_S if mishap == "cut" else 0.0)

    def _move(self, last: Finished | None = None, *, pause_s: float = 0.0) -> None:
        """To another replica. `last` is how the one before ended it: told where no other can go on with it."""
        self._deadlines.left()
        if self.kind is None or self._pool.has(self.kind):
            self._started = False
            self._pool.moved(self)
            if pause_s > 0:
                self._hold(pause_s)
            else:
                self.dispatch()
        elif last is not None:
            self._finish(last.finish_reason, last)
        else:
            self.give_up()

    def _leave(self) -> None:
        if self.attempt is not None:
            self.attempt.replica.abandon(self.attempt)
            self.attempt = None
        self._deadlines.left()

    def _finish(self, reason: FinishReason, last: Finished | None = None) -> None:
        """The terminal event; `last` is the replica's, where it has told one."""
        assert self.stream.accepted is not None
        self.attempt = None
        prompt_tokens, tail = self.stream.accepted.prompt_tokens, "" if last is None else last.text
        self.stream.finish(self._output.finished(reason, prompt_tokens=prompt_tokens, tail=tail, last=last))
        self._pool.ended(self)
