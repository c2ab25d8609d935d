"""The answer to one request, whichever replicas gave it: what its client was told, and what is still to ask."""

from collections.abc import Callable
from dataclasses import replace

import trio

from wsbatch.engine.request import timing
from wsbatch.engine.stream import Stream
from wsbatch.errors import RequestError
from wsbatch.messages import (
    NO_BATCH,
    Accepted,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
    Tokens,
    Usage,
)


class Answer:
    """Ids, times and, with `stream: false`, the text of one request of the pool.

    Args:
        request: what was asked, with the seed set.
        on_cancel: see `Stream`.
        on_event: see `Stream`.

    Attributes:
        stream: the client's.
        decided: set once the request is accepted or refused.
        refusal: why it was refused.
        token_ids: all of the output so far, what the client itself resumed from included.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        on_cancel: Callable[[Stream], None],
        on_event: Callable[[Stream], None] | None,
    ) -> None:
        self.stream = Stream(request, on_cancel=on_cancel, on_event=on_event)
        self.decided = trio.Event()
        self.refusal: RequestError | None = None
        self.token_ids = list(request.resume_token_ids)
        self._request = request
        self._arrived_s = trio.current_time()
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def accepted(self) -> bool:
        """Whether the client was told so."""
        return self.stream.accepted is not None

    @property
    def has_token(self) -> bool:
        """Whether a replica has generated any."""
        return self._first_token_s is not None

    @property
    def over(self) -> bool:
        """Whether the request was refused, or has its terminal event."""
        return self.refusal is not None or not self.stream.live

    def accept(self, event: Accepted) -> None:
        """A replica has accepted it; the client hears of the first."""
        if not self.accepted:
            seed = self._request.sampling.seed
            assert seed is not None
            self.stream.accept(replace(event, id=self._request.id, seed=seed))
            self.decided.set()

    def start(self) -> None:
        """A replica has begun. Until there is a token, a later one that begins anew is the one that counts."""
        if not self.has_token:
            self._started_s = trio.current_time()
        self.stream.start()

    def add(self, tokens: Tokens) -> None:
        """What a replica generated."""
        if not self.has_token:
            self._first_token_s = trio.current_time()
        self.token_ids += tokens.token_ids
        if self._request.stream:
            self.stream.push(list(tokens.token_ids), tokens.text, list(tokens.logprobs or ()))
        else:
            self._text.append(tokens.text)
            self._logprobs += tokens.logprobs or ()

    def rest(self) -> GenerateRequest:
        """What the next replica is asked: to go on from here, within the time that is left. Always streaming, so that
        what one replica has generated is not lost with it."""
        request = self._request
        spent_ms = round((trio.current_time() - self._arrived_s) * 1000)
        # Once it has run it is not to be told that it waited too long.
        queue_timeout_ms = None if self.has_token else request.queue_timeout_ms
        return replace(
            request,
            stream=True,
            resume_token_ids=tuple(self.token_ids),
            timeout_ms=None if request.timeout_ms is None else max(1, request.timeout_ms - spent_ms),
            queue_timeout_ms=None if queue_timeout_ms is None else max(1, queue_timeout_ms - spent_ms),
        )

    def fail(self, error: RequestError) -> None:
        """Refuse the request, or end it with an error if it was accepted."""
        if self.accepted:
            self.stream.fail(error)
        else:
            self.refusal = error
            self.decided.set()

    def finish(self, reason: FinishReason, last: Finished | None) -> None:
        """The terminal event; its times are the pool's own, so that pauses are in them.

        Args:
            reason: why it ended.
            last: how the last replica ended it, with text that was held back; None where none did. The report on the
                batch is that of its part.
        """
        assert self.stream.accepted is not None
        whole = not self._request.stream
        wants_logprobs = self._request.sampling.logprobs is not None
        prompt_tokens = self.stream.accepted.prompt_tokens
        # A replica that resumed may have found output in its cache as well.
        cached_tokens = min(prompt_tokens, last.usage.cached_tokens) if last is not None else 0
        times = timing(
            arrived_s=self._arrived_s,
            started_s=self._started_s,
            first_token_s=self._first_token_s,
            ended_s=trio.current_time(),
            batch_wait_ms=last.timing.batch_wait_ms if last is not None else 0.0,
        )
        self.stream.finish(
            Finished(
                self._request.id,
                reason,
                "".join(self._text) + ("" if last is None else last.text),
                Usage(prompt_tokens, len(self.token_ids), cached_tokens),
                times,
                last.batch if last is not None else NO_BATCH,
                tuple(self.token_ids) if whole else None,
                tuple(self._logprobs) if whole and wants_logprobs else None,
            )
        )
