"""One request on its way through the pool: from replica to replica if need be, and one answer for its client.

Everything here is synchronous: a frame from a replica goes straight into the client's outbox.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from wsbatch.engine.stream import Stream
from wsbatch.errors import ConnectionLost, Draining, ModelError, QueueTimeout, RequestError, Shed, SlowConsumer
from wsbatch.messages import Accepted, Finished, FinishReason, GenerateRequest, Tokens
from wsbatch.pool.answer import Answer
from wsbatch.pool.attempt import Attempt
from wsbatch.pool.failures import INNOCENT_TOKENS, FailureHistory
from wsbatch.pool.needs import estimated_tokens
from wsbatch.pool.outcome import Ended, Failure, Outcome, Stopped
from wsbatch.pool.search import Search, no_room
from wsbatch.pool.time_bounds import TimeBounds

if TYPE_CHECKING:
    from wsbatch.pool.engine_pool import EnginePool

_ANSWER_S = 1.0  # for a replica to say how a request ended that was cancelled there
# Before one of those that may have broken a connection is sent on, about so long, each another time: it is alone then
# if it breaks the next one.
_APART_S = 0.25
_LONGEST_PAUSE_S = 1.0
_RETRY_S = 0.05  # before a replica that has just failed to take a request is asked again


class Route:
    """One accepted or not yet accepted request of the pool.

    Args:
        pool: finds replicas for it.
        key: the pool's number for it.
        request: what was asked, with the seed set: every attempt uses the same.
        on_event: see `Stream`.

    Attributes:
        answer: what the client was told.
        attempt: where it is; None while no replica has it.
        search: for a replica that takes it.
        not_before_s: while no replica has it: when to try again.
    """

    def __init__(
        self, pool: "EnginePool", key: int, request: GenerateRequest, *, on_event: Callable[[Stream], None] | None
    ) -> None:
        self.key = key
        self.request = request
        self.answer = Answer(request, on_cancel=lambda _: self.end("cancelled"), on_event=on_event)
        self.attempt: Attempt | None = None
        self.search = Search(request)
        self.not_before_s = 0.0
        self._pool = pool
        self._tokens = estimated_tokens(request)
        self._failures = FailureHistory()
        self._ending: FinishReason | None = None  # its replica was asked to end it, for this reason
        self._bounds = TimeBounds(request, pool.config, pool.clock)
        self._arm()

    def __repr__(self) -> str:
        where = "waiting" if self.attempt is None else self.attempt.replica.name
        return f"<Route {self.key} {where}: {len(self.answer.token_ids)} tokens>"

    @property
    def waiting(self) -> bool:
        """Accepted, and not known to have started where it is."""
        return self.answer.accepted and not self._started

    def dispatch(self, last: RequestError | None = None) -> None:
        """Send it to a replica. Where none takes it: hold it if it was accepted before, or if a replica has just been
        lost with it; else refuse it. `last`: fail with this instead."""
        while (chosen := self._pool.replicas.place(self.search)) is not None:
            self.search.tried.add(chosen)
            attempt = Attempt(self, chosen, self.answer.rest())
            try:
                chosen.begin(attempt, tokens=self._tokens)
            except ConnectionLost:
                continue
            except RequestError as error:
                if not self._pool.replicas.others_may_take(self.search, chosen, error, was_sent=False):
                    self.fail(error)
                    return
            else:
                self.attempt = attempt
                self._bounds.sent()
                self._arm()
                return
        if last is not None:
            self.fail(last)
        else:
            self._find_no_place()

    # What an attempt tells.

    def accepted(self, event: Accepted) -> None:
        """The replica has accepted it."""
        self.search.found()
        self._bounds.accepted()
        self._arm()
        self.answer.accept(event)

    def started(self) -> None:
        """The replica has begun it."""
        self._bounds.started()
        self.answer.start()

    def got(self, tokens: Tokens) -> None:
        """The replica has generated these."""
        attempt, count = self.attempt, len(tokens.token_ids)
        assert attempt is not None
        if self.search.kind is None:
            self.search.kind = attempt.replica.kind
        self._bounds.got(count)
        self.answer.add(tokens)
        if attempt.tokens - count < INNOCENT_TOKENS <= attempt.tokens:
            self._done_by(attempt)
        if self.answer.stream.overdue(bound := self._pool.config.max_unread_tokens, self._pool.clock.now_s()):
            self.fail(SlowConsumer(f"more than {bound} tokens are unread, the most allowed"))

    def left(self, outcome: Outcome) -> None:
        """It is no longer on its replica. Go on elsewhere, unless it is over or looks like the cause of that."""
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        self._bounds.left()
        self.search.tried.add(attempt.replica)
        if isinstance(outcome, Ended):
            if outcome.finished.finish_reason != "timeout":
                self._done_by(attempt)
            self._finish(outcome.finished.finish_reason, outcome.finished)
        elif self._ending is not None:
            self._finish(self._ending, outcome.finished if isinstance(outcome, Stopped) else None)
        elif isinstance(outcome, Stopped):
            self._stopped(outcome)
        elif isinstance(outcome, Failure):
            self._failed(outcome)
        elif outcome.error.code == Shed.code:
            self.dispatch(outcome.error)
        elif self._pool.replicas.others_may_take(self.search, attempt.replica, outcome.error, was_sent=True):
            self.dispatch()
        else:
            self.fail(outcome.error)

    # What its client, its pool and time do to it.

    def end(self, reason: FinishReason) -> None:
        """End it, with this reason. Where it is on a replica that has given text, that one may still have some which
        was held back: it has a second to say so. Asked twice, it ends at once."""
        attempt = self.attempt
        if attempt is None or not attempt.accepted or not self.answer.token_ids or self._ending is not None:
            self.end_now(reason)
        else:
            self._ending, self._bounds.ending_by_s = reason, trio.current_time() + _ANSWER_S
            attempt.replica.cancel(attempt)
            self._arm()

    def end_now(self, reason: FinishReason) -> None:
        """End it, without a word from its replica."""
        if self.answer.accepted:
            self._leave()
            self._finish(self._ending or reason)
        elif reason == "timeout":
            self.fail(QueueTimeout("the request's whole timeout ran out before a replica accepted it"))
        else:
            self.fail(Draining("the router is shutting down", retry_after_ms=1000))

    def move_away(self) -> None:
        """Its replica is let go of in good order, which nobody is to blame for: go on elsewhere. Where no other replica
        may, it ends with `shutdown`."""
        if not self._has_successor:
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
        self.answer.fail(error)
        self._pool.ended(self)

    def give_up(self) -> None:
        """No replica can go on with it, or take it."""
        if self.answer.accepted:
            self.fail(ModelError("its replica was lost, and no other one with the same weights could go on with it"))
        else:
            self._refuse(None)

    def wake(self) -> None:
        """A time it asked for has come; perhaps one that means nothing any more."""
        begun = self._started or self.answer.has_token
        match self._bounds.due(begun=begun):
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
                assert self.attempt is not None
                self.attempt.stalled()
        if not self.answer.over:
            self._arm()

    @property
    def _started(self) -> bool:
        return self.attempt is not None and self.attempt.started

    @property
    def _has_successor(self) -> bool:
        """Whether there is a replica that may go on with it, or there may be one again."""
        return self.search.kind is None or self._pool.replicas.has(self.search.kind)

    def _arm(self) -> None:
        """Be woken in time."""
        if (at_s := self._bounds.sooner_s()) is not None:
            self._pool.wake_at(self, at_s)

    def _find_no_place(self) -> None:
        refusal = self.search.give_up()
        if not self.answer.accepted and (refusal is not None or not self._failures.count):
            self._refuse(refusal)
            return
        # It was let in before those who are told to come back, and does not wait behind them.
        self._retry_later(_RETRY_S if refusal is None else min((refusal.retry_after_ms or 0) / 1000, _LONGEST_PAUSE_S))

    def _retry_later(self, retry_s: float) -> None:
        """No replica has it for so long at least."""
        config, now_s = self._pool.config, trio.current_time()
        patience_s = config.resume_timeout_s if self.answer.accepted else config.accept_timeout_s
        self.not_before_s = now_s + retry_s
        self._bounds.give_up_s = min(self._bounds.give_up_s, now_s + patience_s)
        self._pool.retry_later(self)
        self._arm()

    def _refuse(self, error: RequestError | None) -> None:
        """Refuse it, with this or as the pool would; but what has befallen replica after replica is not to be tried
        again."""
        if self._failures.count > 1:
            error = ModelError("replicas were lost, or failed, one after another while they had this request")
        self.fail(error or self._pool.refusal() or no_room([]))

    def _done_by(self, attempt: Attempt) -> None:
        attempt.replica.health.succeeded(attempt.sent_s)
        self._failures.succeeded(attempt.replica)

    def _stopped(self, outcome: Stopped) -> None:
        """The replica's own doing: it is being stopped. What it held back is held back by the next one too."""
        at_fault = self._failures.record("moved", outcome.blame, tokens=len(self.answer.token_ids))
        if at_fault or not self._has_successor:
            self._finish("shutdown", outcome.finished)
        else:
            self._move()

    def _failed(self, outcome: Failure) -> None:
        if self._failures.record(outcome.kind, outcome.blame, tokens=len(self.answer.token_ids)):
            self.fail(outcome.error)
        else:
            self._move(pause_s=random.uniform(0.5, 1.5) * _APART_S if outcome.kind == "cut" else 0.0)

    def _move(self, *, pause_s: float = 0.0) -> None:
        """To another replica."""
        if not self._has_successor:
            self.give_up()
            return
        self._pool.moved(self)
        if pause_s > 0:
            self._retry_later(pause_s)
        else:
            self.dispatch()

    def _leave(self) -> None:
        if self.attempt is not None:
            self.attempt.replica.abandon(self.attempt)
            self.attempt = None
        self._bounds.left()

    def _finish(self, reason: FinishReason, last: Finished | None = None) -> None:
        """The terminal event; `last` is the replica's, where it has told one."""
        self.answer.finish(reason, last)
        self._pool.ended(self)
