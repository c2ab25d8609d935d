"""Plain HTTP on the WebSocket port: one exchange, sans-IO, and the probes.

`transport` does the reading and writing. One request a connection: every answer says `Connection: close`.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import h11

from wsbatch.engine.interface import Engine
from wsbatch.errors import RequestError
from wsbatch.server.metrics import CONTENT_TYPE, ServerMetrics

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP response, before it is bytes."""

    status: int
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


class HttpError(Exception):
    """The request cannot be served; `answer` says why."""

    def __init__(self, status: int, message: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.answer = Answer(status, message.encode() + b"\n", headers=headers)


@dataclass(frozen=True, slots=True)
class Head:
    """A request line and its headers; names are lower case."""

    method: bytes
    path: str
    query: str
    http_version: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def values(self, name: bytes) -> list[bytes]:
        """Every value of this header, in order."""
        return [value for key, value in self.headers if key == name]

    @property
    def wants_upgrade(self) -> bool:
        """Whether the client asks for a WebSocket; offers of other protocols (h2c) may be ignored, and are."""
        return any(b"websocket" in value.lower() for value in self.values(b"upgrade"))


class Exchange:
    """One HTTP request and its answer, bytes in and bytes out."""

    def __init__(self, *, max_head_bytes: int) -> None:
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self._received_bytes = 0
        self._method = b""

    @property
    def started(self) -> bool:
        """Whether the client has sent anything."""
        return self._received_bytes > 0

    @property
    def rest(self) -> bytes:
        """What came after the head."""
        return self._h11.trailing_data[0]

    def feed(self, data: bytes | bytearray) -> Head | None:
        """Take what was received; the head once it is complete. Raises HttpError (400, 431)."""
        self._received_bytes += len(data)
        try:
            self._h11.receive_data(bytes(data))
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise HttpError(431, f"request head is over {self._max_head_bytes} bytes") from None
            raise HttpError(400, f"not a valid HTTP request: {error}") from None
        if not isinstance(event, h11.Request):
            return None
        if self._received_bytes - len(self.rest) > self._max_head_bytes:
            raise HttpError(431, f"request head is over {self._max_head_bytes} bytes")
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise HttpError(505, "HTTP/1.1 is spoken here")
        try:
            target = urlsplit(event.target.decode("ascii"))
        except ValueError:
            raise HttpError(400, "not a valid request target") from None
        return Head(event.method, target.path, target.query, event.http_version, tuple(event.headers))

    def upgrade(self, headers: tuple[tuple[str, str], ...]) -> bytes:
        """The bytes that answer an upgrade; what follows is the other protocol's."""
        response = h11.InformationalResponse(status_code=101, reason="Switching Protocols", headers=list(headers))
        return self._h11.send(response) or b""

    def answer(self, answer: Answer) -> bytes:
        """The bytes of the response. Nothing follows it."""
        headers = [("Content-Type", answer.content_type), ("Connection", "close"), *answer.headers]
        if answer.status != 304:  # where it would have to be the length of what is not sent
            headers.append(("Content-Length", str(len(answer.body))))
        reason = HTTPStatus(answer.status).phrase
        data = self._h11.send(h11.Response(status_code=answer.status, reason=reason, headers=headers)) or b""
        if self._method != b"HEAD":
            data += self._h11.send(h11.Data(data=answer.body)) or b""
        return data + (self._h11.send(h11.EndOfMessage()) or b"")


def refused(error: RequestError) -> Answer:
    """The error as an HTTP answer: the wire's `error` map as JSON, and Retry-After where a retry can help."""
    body = {"type": "error", "code": error.code, "status": error.status, "message": error.message}
    headers: tuple[tuple[str, str], ...] = ()
    if error.retry_after_ms is not None:
        body["retry_after_ms"] = error.retry_after_ms
    if error.status == 503:
        # Whole seconds, never 0: a client that takes it literally must not spin.
        headers = (("Retry-After", str(max(1, -(-(error.retry_after_ms or 0) // 1000)))),)
    return Answer(error.status, json.dumps(body).encode() + b"\n", _JSON, headers)


def plain_answer(head: Head, engine: Engine, metrics: ServerMetrics, *, unready: RequestError | None) -> Answer:
    """The answer to a request that is not an upgrade. `unready` is why new work would be refused now."""
    if head.path not in ("/livez", "/readyz", "/metrics"):
        return Answer(404, b"Nothing here. The page is at /, and /livez, /readyz and /metrics answer.\n")
    if head.method not in (b"GET", b"HEAD"):
        return Answer(405, b"GET or HEAD\n", headers=(("Allow", "GET, HEAD"),))
    if head.path == "/metrics":
        return Answer(200, metrics.page(engine.metrics), CONTENT_TYPE)
    if head.path == "/readyz":
        return refused(unready) if unready is not None else Answer(200, b"ready\n")
    return Answer(503, b"engine_dead\n") if engine.state == "dead" else Answer(200, b"alive\n")
