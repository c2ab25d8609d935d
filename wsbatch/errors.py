"""The error tree, and the one table: error ↔ wire code ↔ HTTP status ↔ close code.

Every refusal and every failure that a client can see is one of these classes. The class carries its wire code, the
HTTP status it maps to, and the close code used when it ends a whole connection; `BY_CODE` is the table read from them.
"""

from typing import ClassVar


class WsbatchError(Exception):
    """Base of everything this package raises on purpose."""


class ConnectionLost(WsbatchError):
    """The client's connection ended before the request's terminal frame arrived."""


class StepFailed(WsbatchError):
    """One model step raised; the worker thread itself lives on. `__cause__` holds the model's exception."""


class RequestError(WsbatchError):
    """Base of the errors that end (or refuse) one request with an `error` frame.

    Attributes:
        code: the word on the wire.
        status: the HTTP status with the same meaning.
        close_code: the WebSocket close code when the error ends the connection.
        message: one sentence for a person; names the field and the bound where there is one.
        retry_after_ms: when a retry is worth making, in milliseconds; None where a retry cannot help.
    """

    code: ClassVar[str] = "model_error"
    status: ClassVar[int] = 500
    close_code: ClassVar[int] = 1011

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class BadRequest(RequestError):
    """Malformed or unsupported: the message names the field."""

    code, status, close_code = "bad_request", 400, 1007


class Unauthorized(RequestError):
    """The auth token is missing or wrong."""

    code, status, close_code = "unauthorized", 401, 1008


class SlowConsumer(RequestError):
    """The client did not read its tokens; more are unsent than the limit allows."""

    code, status, close_code = "slow_consumer", 408, 1008


class DuplicateId(RequestError):
    """A request with this id is live on this connection."""

    code, status, close_code = "duplicate_id", 409, 1008


class TooLarge(RequestError):
    """A message or a prompt is over a size limit."""

    code, status, close_code = "too_large", 413, 1009


class NeverFits(RequestError):
    """Prompt plus max_tokens exceed the model's context or the KV pool: no amount of waiting helps."""

    code, status, close_code = "never_fits", 422, 1008


class QuotaExceeded(RequestError):
    """This client's own quota is used up (429), whatever the server's load."""

    code, status, close_code = "quota", 429, 1008


class ModelError(RequestError):
    """The model raised while it ran this request."""

    code, status, close_code = "model_error", 500, 1011


class QueueFull(RequestError):
    """The server is full; another replica may not be."""

    code, status, close_code = "queue_full", 503, 1013


class Shed(RequestError):
    """Dropped from the queue in favour of more urgent requests."""

    code, status, close_code = "shed", 503, 1013


class Draining(RequestError):
    """The server is shutting down and takes no new requests."""

    code, status, close_code = "draining", 503, 1001


class EngineDead(RequestError):
    """The model thread died or stalled; this server will not answer again."""

    code, status, close_code = "engine_dead", 503, 1011


class QueueTimeout(RequestError):
    """The request waited in the queue for longer than it was prepared to."""

    code, status, close_code = "queue_timeout", 504, 1008


def foreign(error: BaseException) -> str:
    """An exception of code that is not ours, for an error message: its type and the beginning of what it says."""
    text = str(error).encode("utf-8", "replace").decode()
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


BY_CODE: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        BadRequest,
        Unauthorized,
        SlowConsumer,
        DuplicateId,
        TooLarge,
        NeverFits,
        QuotaExceeded,
        ModelError,
        QueueFull,
        Shed,
        Draining,
        EngineDead,
        QueueTimeout,
    )
}
