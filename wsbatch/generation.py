"""One admitted request inside the engine: its tokens become text, stop conditions are checked, its times are kept."""

from collections.abc import Callable, Hashable
from typing import TypeVar

from wsbatch.batching.accounting import RowReport
from wsbatch.errors import ModelError, foreign
from wsbatch.messages import BatchReport, Finished, FinishReason, GenerateRequest, Timing, TokenLogprobs, Usage
from wsbatch.stream import Stream
from wsbatch.text import StopText, TextCodec

_NO_COMPANY = RowReport(max_size=0, mean_size=0.0, issued_tokens=0, useful_tokens=0, cached_tokens=0)

_T = TypeVar("_T")


class Generation:
    """A request on its way through the scheduler.

    Args:
        key: the engine's number for it.
        stream: where its events go.
        client: whose it is, for the fair share of the queue.
        prompt_ids: the prompt, without what was already generated elsewhere.
        codec: turns ids into text.
        end_ids: token ids that end the output.
        arrived_s: on the engine's clock.
    """

    def __init__(
        self,
        key: int,
        stream: Stream,
        *,
        client: Hashable,
        prompt_ids: list[int],
        codec: TextCodec,
        end_ids: frozenset[int],
        arrived_s: float,
    ) -> None:
        self.key = key
        self.stream = stream
        self.client = client
        self.reason: FinishReason | None = None  # set at the request's own end
        self.started_s: float | None = None
        self.batch_wait_s = 0.0  # of the time in the queue; known once it has started
        self.arrived_s = arrived_s
        self._prompt_tokens = len(prompt_ids)
        self._end_ids = end_ids
        self._first_token_s: float | None = None
        self._token_ids = list(self.request.resume_token_ids)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        # An answer in a chat begins a text of its own; any other output goes on with the prompt's.
        self._detokenizer = _contained(codec.detokenizer, prompt_ids if self.request.messages is None else ())
        self._stops = StopText(self.request.sampling.stop)
        stopped = False
        for token_id in self.request.resume_token_ids:
            # Sent elsewhere already, all but the tail that was held back there: the same ids hold it back here too.
            _, stopped = self._stops.push(_contained(self._detokenizer.push, token_id))
        # Where all was generated elsewhere and only the word of its end was lost.
        self.ended_elsewhere: FinishReason | None = "stop" if stopped else None if self.tokens_left else "length"
        if stopped:
            _contained(self._detokenizer.flush)

    def __repr__(self) -> str:
        return f"<Generation {self.key}: {len(self._token_ids)} tokens, {self.reason or 'live'}>"

    @property
    def request(self) -> GenerateRequest:
        """What was asked."""
        return self.stream.request

    @property
    def tokens_left(self) -> int:
        """How many it may still generate."""
        return 0 if self.reason is not None else self.request.sampling.most_tokens - len(self._token_ids)

    def advance(self, token_id: int, logprobs: TokenLogprobs | None, now_s: float) -> FinishReason | None:
        """Take the next token; returns why the request is over with it, if it is. An ending id is not output.

        Raises ModelError where the codec cannot turn it into text.
        """
        if self._first_token_s is None:
            self._first_token_s = now_s
        if token_id in self._end_ids:
            return "stop"
        self._token_ids.append(token_id)
        text, stopped = self._stops.push(_contained(self._detokenizer.push, token_id))
        kept = [logprobs] if logprobs is not None else []
        if self.request.stream:
            self.stream.push([token_id], text, kept)
        else:
            self._text.append(text)
            self._logprobs += kept
        if stopped:
            _contained(self._detokenizer.flush)
            return "stop"
        return None if self.tokens_left else "length"

    def finished(self, report: RowReport | None, *, hol_delay_s: float, now_s: float) -> Finished:
        """The terminal event. `report` None means that it never ran. Call once, when `reason` is set.

        Raises ModelError where the codec cannot turn what was held back into text.
        """
        assert self.reason is not None
        tail, stopped = self._stops.push(_contained(self._detokenizer.flush))
        if not stopped:
            tail += self._stops.flush()
        elif self.reason == "length":  # what came free last completes a stop string
            self.reason = "stop"
        whole = not self.request.stream
        company = report or _NO_COMPANY
        started_s = self.started_s if self.started_s is not None else now_s
        first_s = self._first_token_s
        return Finished(
            self.request.id,
            self.reason,
            "".join(self._text) + tail,
            Usage(self._prompt_tokens, len(self._token_ids), company.cached_tokens),
            Timing(
                queue_ms=_ms(started_s - self.arrived_s),
                prefill_ms=_ms(first_s - started_s) if first_s is not None else 0.0,
                ttft_ms=_ms(first_s - self.arrived_s) if first_s is not None else 0.0,
                total_ms=_ms(now_s - self.arrived_s),
                batch_wait_ms=_ms(self.batch_wait_s),
            ),
            BatchReport(
                company.max_size,
                round(company.mean_size, 3),
                company.issued_tokens,
                company.useful_tokens,
                _ms(hol_delay_s),
            ),
            tuple(self._token_ids) if whole else None,
            tuple(self._logprobs) if whole and self.request.sampling.logprobs is not None else None,
        )


def _contained(function: Callable[..., _T], *arguments: object) -> _T:
    """What a codec's function returns. Raises ModelError, whatever it raises: it is this request's error alone."""
    try:
        return function(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is no Exception
        raise ModelError(f"the model's tokenizer cannot decode the output: {foreign(error)}") from error


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
