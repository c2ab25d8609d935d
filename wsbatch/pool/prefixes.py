"""Which replica has computed which beginning of a prompt: its prefix cache may still hold it."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from wsbatch.messages import GenerateRequest
from wsbatch.pool.needs import BYTES_PER_TOKEN

_Place = TypeVar("_Place")

# A beginning is remembered in blocks of so many tokens, or of the bytes that make about as many.
_BLOCK_TOKENS = 64
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
        step = _BLOCK_TOKENS * BYTES_PER_TOKEN
        data = text[: _MAX_BLOCKS * step].encode("utf-8", "surrogatepass")
    hashes = []
    last = 0
    for end in range(step, min(len(data), _MAX_BLOCKS * step) + 1, step):
        last = hash((last, data[end - step : end]))
        hashes.append(last)
    return tuple(hashes)


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
