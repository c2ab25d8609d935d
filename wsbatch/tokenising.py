"""From a request to prompt ids without holding up the event loop."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from wsbatch.errors import TooLarge
from wsbatch.messages import GenerateRequest
from wsbatch.text import TextCodec

_INLINE_BYTES = 2048
"""Up to here tokenising on the event loop costs less than a hop to a thread and back."""


class RunInThread(Protocol):
    """`trio.to_thread.run_sync`, or a stand-in that calls the function where it is."""

    def __call__(self, function: Callable[[], list[int]], /, *, abandon_on_cancel: bool) -> Awaitable[list[int]]:
        """Run the function and return what it returns."""
        ...


class Tokenising:
    """Callable: turns a request into prompt ids.

    Args:
        codec: the model's tokenizer.
        max_model_len: in tokens; a text that cannot be so short is refused by its size, before tokenising.
        thread: runs long texts elsewhere; virtual time, which real threads would break, passes a stand-in.
    """

    def __init__(self, codec: TextCodec, max_model_len: int, *, thread: RunInThread) -> None:
        self._codec = codec
        self._thread = thread
        self._max_bytes = max_model_len * codec.max_token_bytes

    async def __call__(self, request: GenerateRequest) -> list[int]:
        """Waits for a thread where the text is long; cancelling abandons it. Raises BadRequest or TooLarge."""
        if request.token_ids is not None:
            return list(request.token_ids)
        messages = request.messages or ()
        size = len((request.prompt or "").encode()) + sum(len(message.content.encode()) for message in messages)
        if size > self._max_bytes:
            raise TooLarge(f"the prompt holds {size} bytes: more than {self._max_bytes} cannot fit the model's context")

        def encode() -> list[int]:
            if request.prompt is not None:
                return self._codec.encode(request.prompt)
            return self._codec.encode_messages(messages)

        if size <= _INLINE_BYTES:
            return encode()
        return await self._thread(encode, abandon_on_cancel=True)
