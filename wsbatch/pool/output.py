"""What one request has given so far, whichever replicas gave it, and its terminal event as its client should see it."""

import trio

from wsbatch.messages import (
    BatchReport,
    Finished,
    FinishReason,
    GenerateRequest,
    Timing,
    TokenLogprobs,
    Tokens,
    Usage,
)

_NO_BATCH = BatchReport(0, 0.0, 0, 0, 0.0)


class Output:
    """Ids, times and, with `stream: false`, the text of one request of the pool.

    Attributes:
        token_ids: all of the output so far, what the client itself resumed from included.
        arrived_s, started_s, first_token_s: on trio's clock; None for what has not happened.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.token_ids = list(request.resume_token_ids)
        self.arrived_s = trio.current_time()
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self._request = request
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def started(self) -> None:
        """A replica has begun. Until there is a token, a later one that begins anew is the one that counts."""
        if self.first_token_s is None:
            self.started_s = trio.current_time()

    def add(self, tokens: Tokens) -> None:
        """What a replica generated."""
        if self.first_token_s is None:
            self.first_token_s = trio.current_time()
        self.token_ids += tokens.token_ids
        if not self._request.stream:
            self._text.append(tokens.text)
            self._logprobs += tokens.logprobs or ()

    def finished(self, reason: FinishReason, *, prompt_tokens: int, tail: str, last: Finished | None) -> Finished:
        """The terminal event; its times are the pool's own, so that pauses are in them.

        Args:
            reason: why it ended.
            prompt_tokens: of the prompt alone.
            tail: text that was held back.
            last: how the last replica ended it; None where none did. The report on the batch is that of its part.
        """
        whole = not self._request.stream
        wants_logprobs = self._request.sampling.logprobs is not None
        # A replica that resumed may have found output in its cache as well.
        cached_tokens = min(prompt_tokens, last.usage.cached_tokens) if last is not None else 0
        return Finished(
            self._request.id,
            reason,
            "".join(self._text) + tail,
            Usage(prompt_tokens, len(self.token_ids), cached_tokens),
            self._timing(last),
            last.batch if last is not None else _NO_BATCH,
            tuple(self.token_ids) if whole else None,
            tuple(self._logprobs) if whole and wants_logprobs else None,
        )

    def _timing(self, last: Finished | None) -> Timing:
        now_s, first_s = trio.current_time(), self.first_token_s
        started_s = self.started_s if self.started_s is not None else now_s
        return Timing(
            queue_ms=_ms(started_s - self.arrived_s),
            prefill_ms=_ms(first_s - started_s) if first_s is not None else 0.0,
            ttft_ms=_ms(first_s - self.arrived_s) if first_s is not None else 0.0,
            total_ms=_ms(now_s - self.arrived_s),
            batch_wait_ms=last.timing.batch_wait_ms if last is not None else 0.0,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
