"""What a server may say next of one request: its frames are input like any other, and are checked like it."""

from wsbatch.client.errors import ProtocolError
from wsbatch.messages import Accepted, Event, Finished, GenerateRequest, ServerMessage, Started, Tokens
from wsbatch.wire import Codec

OTHER_FRAME_BYTES = 2**20
"""Of a frame that is no answer to a request, nor a snapshot of the batch, at most."""

# No vocabulary has tokens that are longer on average.
_MAX_CHARS_PER_TOKEN = 1024


# On the wire, at most: a character may be an escape in JSON, and there every number is written out.
_BYTES_PER_CHAR = 6
_BYTES_PER_ID = 12
_BYTES_PER_LOGPROB = 48


def read_frame(codec: Codec, data: bytes | str, most_bytes: int) -> ServerMessage | None:
    """`Codec.decode_server` of a frame that may be so large. Raises ProtocolError where it is larger, DecodeError."""
    if len(data) > most_bytes:
        raise ProtocolError(f"the server sent a frame of {len(data)} bytes, and what was asked for takes {most_bytes}")
    return codec.decode_server(data)


def most_answer_bytes(request: GenerateRequest) -> int:
    """What the largest frame about this request may take: the whole answer in one."""
    sampling = request.sampling
    logprobs = 0 if sampling.logprobs is None else sampling.logprobs + 1
    per_token = _BYTES_PER_CHAR * _MAX_CHARS_PER_TOKEN + _BYTES_PER_ID + _BYTES_PER_LOGPROB * logprobs
    return per_token * (sampling.most_tokens + 1)


class Progress:
    """How far one request is, by what its server has said: accepted once and first, tokens without a gap."""

    __slots__ = ("_accepted", "_chars", "_max_tokens", "_started", "_tokens", "_wants_logprobs")

    def __init__(self, request: GenerateRequest) -> None:
        self._accepted = False
        self._started = False
        self._tokens = len(request.resume_token_ids)
        self._chars = 0
        self._max_tokens = request.sampling.most_tokens
        self._wants_logprobs = request.sampling.logprobs is not None

    def check(self, event: Event) -> None:
        """Take the next event. Raises ProtocolError where it cannot come now, or contradicts the request."""
        match event:
            case Tokens():
                self._check_accepted(event)
                self._check_tokens(event)
            case Accepted():
                if self._accepted:
                    raise ProtocolError(f"request {event.id!r}: accepted twice")
                self._accepted = True
            case Started():
                self._check_accepted(event)
                if self._started:
                    raise ProtocolError(f"request {event.id!r}: started twice")
                self._started = True
            case Finished():
                self._check_accepted(event)
                if len(event.token_ids or ()) > self._max_tokens:
                    raise self._too_many(event)
                self._check_text(event, max(self._tokens, len(event.token_ids or ())))

    def _check_accepted(self, event: Tokens | Started | Finished) -> None:
        if not self._accepted:
            what = type(event).__name__.lower()
            raise ProtocolError(f"request {event.id!r}: {what} without having been accepted")

    def _check_tokens(self, event: Tokens) -> None:
        if event.index != self._tokens:
            raise ProtocolError(f"request {event.id!r}: token {self._tokens} was due, got {event.index}")
        self._tokens += len(event.token_ids)
        if self._tokens > self._max_tokens:
            raise self._too_many(event)
        wanted = len(event.token_ids) if self._wants_logprobs else 0
        if len(event.logprobs or ()) != wanted:
            raise ProtocolError(f"request {event.id!r}: {wanted} logprobs were due, got {len(event.logprobs or ())}")
        self._check_text(event, self._tokens)

    def _check_text(self, event: Tokens | Finished, tokens: int) -> None:
        self._chars += len(event.text)
        if self._chars > (bound := _MAX_CHARS_PER_TOKEN * (tokens + 1)):
            raise ProtocolError(f"request {event.id!r}: got over {bound} characters of {tokens} tokens")

    def _too_many(self, event: Tokens | Finished) -> ProtocolError:
        return ProtocolError(f"request {event.id!r}: got over {self._max_tokens} tokens")
