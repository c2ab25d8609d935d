"""The output of one request: its tokens become text, and its stop conditions are checked."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from wsbatch.errors import ModelError, foreign
from wsbatch.messages import FinishReason, GenerateRequest, TokenLogprobs
from wsbatch.text import StopText, TextCodec

_T = TypeVar("_T")


class Output:
    """Tokens and text so far; what was generated elsewhere (`resume_token_ids`) is its beginning.

    Args:
        request: what was asked.
        prompt_ids: the prompt, which the text of the output continues.
        codec: turns ids into text.
        end_ids: token ids that end the output and are not part of it.

    Attributes:
        token_ids: of the output.
        complete: why nothing is to be generated: the beginning is the whole output already; else None.

    Raises ModelError where the codec cannot turn `resume_token_ids` into text.
    """

    def __init__(
        self, request: GenerateRequest, prompt_ids: Sequence[int], *, codec: TextCodec, end_ids: frozenset[int]
    ) -> None:
        self.token_ids = list(request.resume_token_ids)
        self._max_tokens = request.sampling.most_tokens
        self._end_ids = end_ids
        # An answer in a chat begins a text of its own; any other output goes on with the prompt's.
        self._detokenizer = _contained(codec.detokenizer, prompt_ids if request.messages is None else ())
        self._stops = StopText(request.sampling.stop)
        # Kept for a request that does not stream.
        self._whole = not request.stream
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.sampling.logprobs is None else []
        stopped = False
        for token_id in request.resume_token_ids:
            # Sent elsewhere already, all but the tail that was held back there: the same ids hold it back here too.
            _, stopped = self._stops.push(_contained(self._detokenizer.push, token_id))
        self.complete: FinishReason | None = "stop" if stopped else None if self.tokens_left else "length"
        if stopped:
            _contained(self._detokenizer.flush)

    def __repr__(self) -> str:
        return f"<Output of {len(self.token_ids)} tokens, {self.tokens_left} left>"

    @property
    def tokens_left(self) -> int:
        """How many may still be generated."""
        return self._max_tokens - len(self.token_ids)

    def ends_with(self, token_id: int) -> bool:
        """Whether this id ends the output; then it is not to be pushed."""
        return token_id in self._end_ids

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> tuple[str, FinishReason | None]:
        """Take the next token: the text that is now certain, and why the output is over with it, if it is.

        Raises ModelError where the codec cannot turn it into text.
        """
        self.token_ids.append(token_id)
        text, stopped = self._stops.push(_contained(self._detokenizer.push, token_id))
        if self._whole:
            self._text.append(text)
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs)
        if stopped:
            _contained(self._detokenizer.flush)
            return text, "stop"
        return text, None if self.tokens_left else "length"

    def flush(self) -> tuple[str, bool]:
        """What `finished` carries as text, and whether a stop string was completed only now. Call it once, at the end.

        Raises ModelError where the codec cannot turn what was held back into text.
        """
        tail, stopped = self._stops.push(_contained(self._detokenizer.flush))
        if not stopped:
            tail += self._stops.flush()
        return "".join(self._text) + tail, stopped

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of all tokens generated here, where they were asked for by a request that does not stream."""
        return None if self._logprobs is None or not self._whole else tuple(self._logprobs)


def _contained(function: Callable[..., _T], *arguments: object) -> _T:
    """What a codec's function returns. Raises ModelError, whatever it raises: it is this request's error alone."""
    try:
        return function(*arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust code is no Exception
        raise ModelError(f"the model's tokenizer cannot decode the output: {foreign(error)}") from error
