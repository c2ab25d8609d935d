"""What became of a request on one replica, once it is no longer there."""

from dataclasses import dataclass
from typing import TypeAlias, get_args

from wsbatch.client.errors import error_of
from wsbatch.errors import BY_CODE, BadRequest, EngineDead, ModelError, QueueTimeout, RequestError, SlowConsumer
from wsbatch.messages import Failed, Finished, FinishReason, GenerateRequest
from wsbatch.pool.failures import FailureKind
from wsbatch.pool.replica import Blame, Replica
from wsbatch.pool.search import ELSEWHERE, LARGER

# Refusals that are about the request, wherever it is sent.
_FINAL = frozenset(error.code for error in (BadRequest, QueueTimeout))


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over: so it is for the client."""

    finished: Finished


@dataclass(frozen=True, slots=True)
class Stopped:
    """The replica ended it of its own accord, or because it was asked to."""

    finished: Finished
    blame: Blame | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica has not begun it, or no longer wants it."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class Failure:
    """The replica, or what connects it, has failed it.

    Attributes:
        error: what the client is told where the request is taken for the cause.
        blame: of the replica; None where nobody is to blame, or something else is the likelier cause.
    """

    kind: FailureKind
    error: RequestError
    blame: Blame | None


Outcome: TypeAlias = Ended | Stopped | Refused | Failure


def of_finished(event: Finished, replica: Replica, request: GenerateRequest) -> Outcome:
    """Of a `finished` frame."""
    if event.finish_reason in ("cancelled", "shutdown"):
        return Stopped(event, None if replica.draining else Blame(replica))
    if event.finish_reason not in get_args(FinishReason):
        return broken("it finished for a reason that is none", replica)
    if event.finish_reason == "timeout" and request.timeout_ms is None:
        return broken("it ran out of a time that it was not given", replica)
    return Ended(event)


def of_failed(event: Failed, replica: Replica, *, accepted: bool, started: bool) -> Outcome:
    """Of an `error` frame. accepted, started: whether the replica has said so before."""
    error = error_of(event)
    if accepted and event.code == EngineDead.code:
        return lost(event.message, Blame(replica), with_replica=True, started=started)
    if event.code == SlowConsumer.code:  # this router's doing, not the client's, of which the replica knows nothing
        return Failure("moved", error, None)
    if event.code in ELSEWHERE | LARGER | _FINAL:
        return Refused(error)
    known = event.code in BY_CODE
    said = error.message if known else f"a replica answered with an unknown error: {error.message}"
    return Failure("failed", ModelError(said), Blame(replica))


def lost(why: str, blame: Blame | None, *, with_replica: bool, started: bool) -> Failure:
    """Of the loss of the replica, or of a connection to it alone."""
    kind: FailureKind = "killed" if started else "lost"
    if not with_replica:
        kind = "moved" if blame is None else "cut"
    return Failure(kind, ModelError(f"replicas were lost one after another while they had this request: {why}"), blame)


def broken(why: str, replica: Replica) -> Failure:
    """Of a breach of the protocol."""
    return Failure("failed", ModelError(f"replicas gave no valid answer: {why}"), Blame(replica))


def stalled(replica: Replica, *, accepted: bool) -> Failure:
    """Of a replica that has said too little of it for too long."""
    what = "went on with" if accepted else "answered"
    return Failure("failed", ModelError(f"no replica {what} this request in time, one after another"), Blame(replica))
