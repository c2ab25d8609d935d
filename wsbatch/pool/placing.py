"""Which replica a request goes to: the one with the least work, unless another has computed its prompt's beginning."""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from wsbatch.messages import GenerateRequest, Limits

_Place = TypeVar("_Place")

# A beginning is remembered in blocks of so many tokens, or of the bytes that make about as many.
_BLOCK_TOKENS = 64
_BYTES_PER_TOKEN = 4
_MAX_BLOCKS = 64
_MAX_ENTRIES = 65_536


def beginnings(request: GenerateRequest) -> tuple[int, ...]:
    """A hash for each beginning of the prompt that ends with a whole block, shortest first.

    The router has no tokenizer: the text stands in for its tokens. Of a long prompt the first 4096 tokens count.
    """
    if request.token_ids is not None:
        data = array("q", request.token_ids[: _MAX_BLOCKS * _BLOCK_TOKENS]).tobytes()
        step = _BLOCK_TOKENS * 8
    else:
        turns = request.messages or ()
        text = request.prompt or "".join(f"{turn.role}\0{turn.content}\0" for turn in turns)
        step = _BLOCK_TOKENS * _BYTES_PER_TOKEN
        data = text[: _MAX_BLOCKS * step].encode("utf-8", "surrogatepass")
    hashes = []
    last = 0
    for end in range(step, min(len(data), _MAX_BLOCKS * step) + 1, step):
        last = hash((last, data[end - step : end]))
        hashes.append(last)
    return tuple(hashes)


def estimated_tokens(request: GenerateRequest) -> int:
    """Prompt and output of a request, before any tokenizer has seen it."""
    size = sum(len(turn.content) for turn in request.messages or ()) + len(request.prompt or "")
    prompt = len(request.token_ids or ()) + size // _BYTES_PER_TOKEN
    return prompt + request.sampling.most_tokens


@dataclass(frozen=True, slots=True)
class Needs:
    """What a replica must take for a request to be sent there, as far as is known: a text's tokens are not."""

    model_len: int
    message_bytes: int
    logprobs: int

    def met_by(self, limits: Limits) -> bool:
        """Whether a replica with these limits takes it."""
        return (
            self.model_len <= limits.max_model_len
            and self.message_bytes <= limits.max_message_bytes
            and self.logprobs <= limits.max_logprobs
        )


def needs(request: GenerateRequest) -> Needs:
    """Of a request that nobody has refused yet."""
    prompt = len(request.token_ids) if request.token_ids is not None else 1
    # Where no length is asked for, what is left of the context will do.
    return Needs(prompt + (request.sampling.max_tokens or 1), 0, request.sampling.logprobs or 0)


class PrefixTable(Generic[_Place]):
    """Who computed which beginning last. A wrong entry costs a cache miss, so collisions do not matter."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._holders: OrderedDict[int, _Place] = OrderedDict()
        self._max_entries = max_entries

    def __len__(self) -> int:
        return len(self._holders)

    def holder(self, hashes: Sequence[int]) -> _Place | None:
        """Who computed the longest of these beginnings; None where nobody did."""
        for value in reversed(hashes):
            if (found := self._holders.get(value)) is not None:
                return found
        return None

    def remember(self, hashes: Sequence[int], place: _Place) -> None:
        """This one computes them now. The least recently computed are forgotten."""
        for value in hashes:
            self._holders[value] = place
            self._holders.move_to_end(value)
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)

    def forget(self, place: _Place) -> None:
        """This one has lost its cache."""
        self._holders = OrderedDict((value, held) for value, held in self._holders.items() if held is not place)


def choose(work_tokens: Mapping[_Place, float], holder: _Place | None, *, slack_tokens: int) -> _Place:
    """The place for a request.

    Args:
        work_tokens: outstanding tokens of everyone who could take it; not empty. Of equals the first is taken.
        holder: who has computed its prompt's beginning.
        slack_tokens: the holder is preferred while it has at most so many tokens more to generate than the least busy.
    """
    least = min(work_tokens, key=work_tokens.__getitem__)
    if holder is not None and holder in work_tokens and work_tokens[holder] <= work_tokens[least] + slack_tokens:
        return holder
    return least
