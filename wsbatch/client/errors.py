"""What a client raises: the server's own errors by their code, and what the connection does by itself."""

import trio_websocket

from wsbatch.errors import BY_CODE, QueueFull, QuotaExceeded, RequestError, Unauthorized, WsbatchError
from wsbatch.messages import Failed
from wsbatch.wire import JSON, DecodeError


class ProtocolError(WsbatchError):
    """The server broke the protocol: a wrong subprotocol or version, tokens missing from a stream."""


class Refused(WsbatchError):
    """The server, or something in front of it, answered the upgrade with an HTTP status of its own.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# What a server may ask for at most: a day. A longer time would never be waited for.
_MAX_RETRY_AFTER_MS = 86_400_000
# Of a server's own words, so many characters are kept.
_MAX_WORDS = 1000

# For answers without an error frame in the body: from a proxy, say.
_BY_STATUS: dict[int, type[RequestError]] = {401: Unauthorized, 429: QuotaExceeded, 503: QueueFull}


def printable(text: str) -> str:
    """A peer's words for a log line or a terminal: escaped where they would be more than text, and cut where long."""
    words = text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in words)


def error_of(failed: Failed) -> RequestError:
    """The exception that an error frame stands for.

    A code that this version does not know becomes a plain RequestError that carries code and status as they came.
    """
    known = BY_CODE.get(failed.code)
    if known is None:
        known = type("RequestError", (RequestError,), {"code": failed.code, "status": failed.status})
    retry_after_ms = failed.retry_after_ms
    if retry_after_ms is not None:
        retry_after_ms = min(retry_after_ms, _MAX_RETRY_AFTER_MS)
    return known(failed.message[:_MAX_WORDS], retry_after_ms=retry_after_ms)


def how_closed(closed: trio_websocket.ConnectionClosed) -> tuple[str, int | None]:
    """Why a connection ended, and the code that the server closed it with; None where it broke."""
    reason = closed.reason
    if reason is None or reason.code == 1006:
        return "the connection broke", None
    why = f", {reason.reason}" if reason.reason else ""
    return f"the connection was closed ({reason.code}{why})", reason.code


def refusal_of(status: int, headers: tuple[tuple[bytes, bytes], ...], body: bytes | None) -> WsbatchError:
    """The exception for an upgrade that was answered with `status`: the error frame in the body says it best."""
    try:
        failed = JSON.decode_server((body or b"").decode())
    except (DecodeError, UnicodeDecodeError):
        failed = None
    if isinstance(failed, Failed):
        return error_of(failed)
    text = (body or b"").decode(errors="replace").strip()[:200]
    message = f"the upgrade was refused with HTTP status {status}{': ' if text else ''}{text}"
    if status not in _BY_STATUS:
        return Refused(status, message)
    return _BY_STATUS[status](message, retry_after_ms=_retry_after_ms(headers))


def _retry_after_ms(headers: tuple[tuple[bytes, bytes], ...]) -> int | None:
    for name, value in headers:
        if name.lower() == b"retry-after" and value.isdigit():
            # Python refuses to read numbers of thousands of digits.
            return min(int(value) * 1000, _MAX_RETRY_AFTER_MS) if len(value) < 10 else _MAX_RETRY_AFTER_MS
    return None
