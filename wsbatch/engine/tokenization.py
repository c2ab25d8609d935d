"""From a request to prompt ids without holding up the event loop."""

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

import trio

from wsbatch.batching.fairness import Client
from wsbatch.errors import BadRequest, RequestError, TooLarge, foreign
from wsbatch.messages import GenerateRequest
from wsbatch.text import TextCodec

_INLINE_BYTES = 2048
"""Up to here tokenizing on the event loop costs less than a hop to a thread and back."""
_MESSAGE_BYTES = 64
"""What the chat template costs for a message, however short, is what so many bytes of text cost."""

_THREADS = 2

_threads = trio.lowlevel.RunVar[trio.CapacityLimiter]("wsbatch tokenization")

Run = Callable[[Callable[[], list[int]], trio.CapacityLimiter], Awaitable[list[int]]]


class _TwoLimits:
    """A limiter for `trio.to_thread`: the thread counts against a client's own bound first, then against that of all.

    Both are held until the thread is done, also where nobody waits for it any more: abandoned work is work.
    """

    def __init__(self, own: trio.CapacityLimiter, all_: trio.CapacityLimiter) -> None:
        self._own = own
        self._all = all_

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._own.acquire_on_behalf_of(borrower)
        try:
            await self._all.acquire_on_behalf_of(borrower)
        except BaseException:
            self._own.release_on_behalf_of(borrower)
            raise

    def release_on_behalf_of(self, borrower: object) -> None:
        self._all.release_on_behalf_of(borrower)
        self._own.release_on_behalf_of(borrower)


async def in_thread(function: Callable[[], list[int]], own: trio.CapacityLimiter) -> list[int]:
    """Run the function on a thread, two at a time at most. Cancelling abandons it: it has no side effects."""
    try:
        threads = _threads.get()
    except LookupError:
        threads = trio.CapacityLimiter(_THREADS)
        _threads.set(threads)
    # A limiter is anything with these two methods, by trio's documentation, but not by its annotations.
    limiter: Any = _TwoLimits(own, threads)
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)


class PromptTokenizer:
    """Callable: turns a request into prompt ids.

    Args:
        codec: the model's tokenizer.
        max_model_len: in tokens; a text that cannot be so short is refused by its size, before tokenizing.
        run: runs a long text's encoding elsewhere; virtual time, which real threads would break, passes a stand-in.
    """

    def __init__(self, codec: TextCodec, max_model_len: int, *, run: Run = in_thread) -> None:
        self._codec = codec
        self._run = run
        self._max_bytes = max_model_len * codec.max_token_bytes
        self._own: WeakValueDictionary[Client, trio.CapacityLimiter] = WeakValueDictionary()

    async def __call__(self, request: GenerateRequest, client: Client) -> list[int]:
        """Waits for a thread where the text is long; cancelling abandons it. Raises BadRequest or TooLarge.

        Of each client one text at a time is tokenized on a thread: its others wait behind it, and nobody else does.
        """
        if request.parse_special and request.prompt is None:
            raise BadRequest("parse_special: goes with prompt: a chat template has its special tokens, ids are tokens")
        if request.token_ids is not None:
            return list(request.token_ids)
        messages = request.messages or ()
        texts = [request.prompt or "", *(message.content for message in messages)]
        if (chars := sum(map(len, texts))) > self._max_bytes:
            raise self._too_large(f"at least {chars}")  # which is known without encoding it
        if chars <= _INLINE_BYTES and self._size(texts) + _MESSAGE_BYTES * len(messages) <= _INLINE_BYTES:
            return self._encode(request)
        own = self._own.get(client)
        if own is None:
            own = self._own[client] = trio.CapacityLimiter(1)
        return await self._run(lambda: self._encode_long(request, texts), own)

    def _too_large(self, size: str) -> TooLarge:
        return TooLarge(f"the prompt holds {size} bytes: more than {self._max_bytes} cannot fit the model's context")

    def _size(self, texts: list[str]) -> int:
        """Bytes of UTF-8 in all. Raises TooLarge for more than can fit."""
        size = sum(map(_utf8_bytes, texts))
        if size > self._max_bytes:
            raise self._too_large(str(size))
        return size

    def _encode_long(self, request: GenerateRequest, texts: list[str]) -> list[int]:
        self._size(texts)
        return self._encode(request)

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


def _utf8_bytes(text: str) -> int:
    """A lone surrogate counts too: refusing it is the codec's business."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
