"""From a request to prompt ids without holding up the event loop."""

from collections.abc import Awaitable, Callable

import trio

from wsbatch.errors import BadRequest, RequestError, TooLarge, foreign
from wsbatch.messages import GenerateRequest
from wsbatch.text import TextCodec

_INLINE_BYTES = 2048
"""Up to here tokenising on the event loop costs less than a hop to a thread and back."""


_limiter = trio.lowlevel.RunVar[trio.CapacityLimiter]("wsbatch tokenising")

Run = Callable[[Callable[[], list[int]]], Awaitable[list[int]]]


async def in_thread(function: Callable[[], list[int]]) -> list[int]:
    """Run the function on a thread, two at a time at most. Cancelling abandons it: it has no side effects."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(2)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


class Tokenising:
    """Callable: turns a request into prompt ids.

    Args:
        codec: the model's tokenizer.
        max_model_len: in tokens; a text that cannot be so short is refused by its size, before tokenising.
        run: runs a long text's encoding elsewhere; virtual time, which real threads would break, passes a stand-in.
    """

    def __init__(self, codec: TextCodec, max_model_len: int, *, run: Run = in_thread) -> None:
        self._codec = codec
        self._run = run
        self._max_bytes = max_model_len * codec.max_token_bytes

    async def __call__(self, request: GenerateRequest) -> list[int]:
        """Waits for a thread where the text is long; cancelling abandons it. Raises BadRequest or TooLarge."""
        if request.parse_special and request.prompt is None:
            raise BadRequest("parse_special: goes with prompt: a chat template has its special tokens, ids are tokens")
        if request.token_ids is not None:
            return list(request.token_ids)
        messages = request.messages or ()
        size = _size(request.prompt or "") + sum(_size(message.content) for message in messages)
        if size > self._max_bytes:
            raise TooLarge(f"the prompt holds {size} bytes: more than {self._max_bytes} cannot fit the model's context")

        if size <= _INLINE_BYTES:
            return self._encode(request)
        return await self._run(lambda: self._encode(request))

    def _encode(self, request: GenerateRequest) -> list[int]:
        """Whatever a tokenizer or a template raises over this request is the request's error, and nobody else's."""
        try:
            if request.prompt is not None:
                return self._codec.encode(request.prompt, parse_special=request.parse_special)
            return self._codec.encode_messages(request.messages or ())
        except (RequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust code is no Exception
            field = "messages" if request.prompt is None else "prompt"
            raise BadRequest(f"{field}: the model's tokenizer cannot encode it: {foreign(error)}") from error


def _size(text: str) -> int:
    """Bytes of UTF-8; a lone surrogate counts too: refusing it is the codec's business."""
    return len(text.encode("utf-8", "surrogatepass"))
