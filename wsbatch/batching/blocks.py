"""The KV block allocator and its prefix index. Numbers only: what is stored in a block is the model's business.

A block is in one of three states:

- free: nobody uses it and its content is worth nothing;
- used: at least one row holds a reference to it;
- cached: nobody uses it, but its content is known (it is in the prefix index) and may be asked for again.

`free + cached + used == total` always. The index is a hash chain, as in vLLM's automatic prefix caching: a full block
is found by its predecessor's identity and its own tokens, so equal tokens behind different beginnings stay apart. The
index is a dict whose keys hold the tokens themselves, so a hash hit compares them.

A block's predecessor can be named by its number alone, because it never leaves the index before its successors: whoever
holds a block holds all before it (`publish` sees to that), and `release` takes the last first, so the successor is
always the less recently used one. Eviction therefore only ever meets blocks that nothing in the index leads on from.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_Content: TypeAlias = tuple[int, tuple[int, ...]]  # the block before it (or _ROOT), and its own tokens

_ROOT = -1


class BlockPool:
    """`total_blocks` blocks of `block_tokens` tokens each, numbered from 0. Every operation is O(1) a block.

    Attributes:
        total: blocks there are.
        block_tokens: tokens that a block holds.
        prefix_cache: whether full blocks are remembered and shared.
        queried_tokens: tokens looked up in the prefix index, once a request.
        hit_tokens: of those, the ones found.
        evictions: cached blocks whose content was given up for a new use.
    """

    def __init__(self, total_blocks: int, block_tokens: int, *, prefix_cache: bool = True) -> None:
        if total_blocks < 1:
            raise ValueError(f"total_blocks is {total_blocks}: must be at least 1")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: must be at least 1")
        self.total = total_blocks
        self.block_tokens = block_tokens
        self.prefix_cache = prefix_cache
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        self._free = list(range(total_blocks - 1, -1, -1))  # a stack: the block used last is warm in the CPU's cache
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * total_blocks
        self._index: dict[_Content, int] = {}
        self._content: list[_Content | None] = [None] * total_blocks  # the block's own key in the index

    def __repr__(self) -> str:
        return f"<BlockPool {self.used} used + {self.cached} cached + {self.free} free of {self.total}>"

    @property
    def free(self) -> int:
        """Blocks without a user and without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks without a user whose content can be found by its tokens."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that rows hold."""
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: the free, and the cached that it would evict."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """`count` blocks with one reference each; free ones first, then the least recently used of the cached.

        Raises ValueError where `count` exceeds `available`; nothing is taken then.
        """
        if count > self.available:
            raise ValueError(f"{count} blocks asked for: must be at most {self.available}, what is available")
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return tuple(blocks)

    def match_prefix(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The longest known beginning of these tokens: its blocks, in order, and how many tokens they hold.

        Only full blocks, and never all of the tokens: the logits of the last one have yet to be computed. Takes no
        references: call `acquire` before anything else is allocated.
        """
        size, parent, blocks = self.block_tokens, _ROOT, []
        if self._index:
            for start in range(0, len(token_ids) - size, size):
                found = self._index.get((parent, tuple(token_ids[start : start + size])))
                if found is None:
                    break
                blocks.append(found)
                parent = found
        return tuple(blocks), len(blocks) * size

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of these used or cached blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def count_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        """Count a request's look-up in the index; here and not in `match_prefix`, which may be asked repeatedly."""
        if self.prefix_cache:
            self.queried_tokens += queried_tokens
            self.hit_tokens += hit_tokens

    def publish(self, block: int, after: int | None, token_ids: tuple[int, ...]) -> int:
        """Make a full block known by its tokens, and return the block to use instead of it from now on.

        `after` is the block before it in the row, itself published; None for the first. Call it once the block's KV has
        really been computed, and by its only holder. Where the same content is known already, that block is returned
        with a reference and the new one is freed: the row goes on with the known one, so one copy is kept and a
        successor's holder always holds the predecessor that the index names. Without a prefix cache nothing happens.
        """
        if not self.prefix_cache:
            return block
        content = (_ROOT if after is None else after, token_ids)
        known = self._index.setdefault(content, block)
        if known == block:
            self._content[block] = content
        else:
            self.acquire((known,))
            self.release((block,))
        return known

    def release(self, blocks: Sequence[int]) -> None:
        """One reference fewer to each of a row's blocks, given in the row's order."""
        for block in reversed(blocks):  # successors become evictable before their predecessors
            self._references[block] -= 1
            if not self._references[block]:
                if self._content[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise RuntimeError unless the books are right and these block tables are all the references there are."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        rank = {block: place for place, block in enumerate(self._cached)}
        for block, content in enumerate(self._content):
            self._check_state(block, held[block], free[block], cached=block in rank)
            if content is not None:
                if free[block] or self._index.get(content) != block:
                    self._broken(block, "has content under which it cannot be found")
                self._check_parent(block, content[0], held, rank)
        if len(self._index) != sum(content is not None for content in self._content):
            raise RuntimeError(f"{self!r}: the index has {len(self._index)} entries, not one for each known block")

    def _check_state(self, block: int, holders: int, times_free: int, *, cached: bool) -> None:
        """It is in one of the three states, and each holder has a reference."""
        if self._references[block] != holders:
            self._broken(block, f"has {self._references[block]} references and {holders} holders")
        if (holders > 0) + times_free + cached != 1:
            self._broken(block, f"has {holders} holders, is {times_free} times free, cached: {cached}")
        if cached and self._content[block] is None:
            self._broken(block, "is cached without content")

    def _check_parent(self, block: int, parent: int, held: Counter[int], rank: dict[int, int]) -> None:
        """The block before it is known, and stays so for as long as this one."""
        if parent == _ROOT:
            return
        if self._content[parent] is None:
            self._broken(block, f"comes after block {parent}, which the index does not know")
        if not held[parent] and (held[block] or rank[parent] < rank[block]):
            self._broken(block, f"would be evicted after block {parent}, which comes before it")

    def _broken(self, block: int, why: str) -> None:
        raise RuntimeError(f"{self!r}: block {block} {why}")

    def _evict(self) -> int:
        """The least recently used cached block, its content forgotten."""
        block, _ = self._cached.popitem(last=False)
        content = self._content[block]
        if content is not None:
            del self._index[content]
        self._content[block] = None
        self.evictions += 1
        return block
