"""The block pool: states, sharing, eviction, and its own integrity check."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsbatch.batching.blocks import BlockPool


def filled(pool: BlockPool, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """A row that computes these tokens from nothing: its blocks, the full ones published."""
    size = pool.block_tokens
    table = list(pool.allocate(-(-len(tokens) // size)))
    for index in range(len(tokens) // size):
        content = tokens[index * size : (index + 1) * size]
        table[index] = pool.publish(table[index], table[index - 1] if index else None, content)
    return tuple(table)


def test_states_add_up() -> None:
    pool = BlockPool(4, 2)
    row = filled(pool, (1, 2, 3))
    assert (pool.free, pool.cached, pool.used, pool.available) == (2, 0, 2, 2)
    pool.release(row)
    assert (pool.free, pool.cached, pool.used, pool.available) == (3, 1, 0, 4)
    assert repr(pool) == "<BlockPool 0 used + 1 cached + 3 free of 4>"
    pool.check()


@pytest.mark.parametrize(
    ("prompt", "matched"),
    [
        ((1, 2, 3, 4, 5, 6), 4),
        ((1, 2, 3, 4, 5), 4),
        ((1, 2, 3, 4), 2),  # known to its end, and yet its last token needs logits
        ((1, 2, 3), 2),
        ((1, 2), 0),
        ((1,), 0),
        ((1, 2, 3, 9, 5), 2),
        ((3, 4, 1, 2, 5), 0),  # known tokens behind another beginning
        ((9, 2, 3, 4, 5), 0),
    ],
)
def test_match_is_the_longest_known_beginning_but_never_everything(prompt: tuple[int, ...], matched: int) -> None:
    pool = BlockPool(8, 2)
    row = filled(pool, (1, 2, 3, 4, 5))  # the last block is half full: not to be shared
    assert pool.match_prefix(prompt) == (row[: matched // 2], matched)
    assert pool.match_prefix(list(prompt)) == (row[: matched // 2], matched)


def test_equal_hashes_are_not_equal_tokens() -> None:
    assert hash((-1,)) == hash((-2,))  # CPython: hash(-1) is -2
    pool = BlockPool(8, 1)
    filled(pool, (-1, 7))
    assert pool.match_prefix((-2, 7, 7)) == ((), 0)
    second = filled(pool, (-2, 7))
    assert pool.match_prefix((-2, 7, 7)) == (second, 2)


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(4, 2)
    first = filled(pool, (1, 2))
    shared, _ = pool.match_prefix((1, 2, 3))
    pool.acquire(shared)
    pool.release(first)
    assert (pool.used, pool.cached) == (1, 0)
    pool.check([shared])
    pool.release(shared)
    assert (pool.used, pool.cached) == (0, 1)
    pool.acquire(shared)  # from the cached
    assert (pool.used, pool.cached) == (1, 0)


def test_the_least_recently_used_goes_first_and_successors_before_predecessors() -> None:
    pool = BlockPool(6, 1)
    old, new = filled(pool, (1, 2, 3)), filled(pool, (7, 8, 9))
    pool.release(new)
    pool.release(old)
    pool.acquire(new[:1])  # touched last
    pool.release(new[:1])
    expected = [new[2], new[1], old[2], old[1], old[0], new[0]]
    for count, block in enumerate(expected, 1):
        assert pool.allocate(1) == (block,)
        assert pool.evictions == count
        assert pool.cached == 6 - count
    assert pool.match_prefix((1, 2, 3, 4)) == ((), 0)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 1)
    pool.release(filled(pool, (1,)))
    held = pool.allocate(2)
    assert pool.evictions == 0
    assert pool.match_prefix((1, 5))[1] == 1
    pool.release(held)
    assert pool.free == 2


def test_content_computed_twice_is_kept_once() -> None:
    pool = BlockPool(8, 2)
    first = filled(pool, (1, 2, 3, 4))
    second = filled(pool, (1, 2, 3, 4, 5, 6))
    assert second[:2] == first
    assert (pool.used, pool.free) == (3, 5)
    pool.check([first, second])
    pool.release(first)
    pool.check([second])
    # the first row is gone, and what the second built on its blocks is still found
    assert pool.match_prefix((1, 2, 3, 4, 5, 6, 7)) == (second, 6)


def test_content_computed_again_revives_the_cached_copy() -> None:
    pool = BlockPool(8, 2)
    mine = pool.allocate(1)
    first = filled(pool, (1, 2))
    pool.release(first)
    assert pool.publish(mine[0], None, (1, 2)) == first[0]
    assert (pool.used, pool.cached) == (1, 0)
    pool.check([first])


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    pool = BlockPool(4, 1, prefix_cache=False)
    first, second = filled(pool, (1, 2)), filled(pool, (1, 2))
    assert not set(first) & set(second)
    assert pool.match_prefix((1, 2, 3)) == ((), 0)
    pool.release(first)
    assert (pool.free, pool.cached) == (2, 0)
    pool.count_lookup(3, 0)
    assert pool.queried_tokens == 0


def test_look_ups_are_counted_in_tokens() -> None:
    pool = BlockPool(4, 1)
    pool.count_lookup(10, 0)
    pool.count_lookup(10, 8)
    assert (pool.queried_tokens, pool.hit_tokens) == (20, 8)


def test_asking_for_too_much_takes_nothing() -> None:
    pool = BlockPool(3, 1)
    pool.release(filled(pool, (1,)))
    with pytest.raises(ValueError, match="4 blocks asked for: must be at most 3"):
        pool.allocate(4)
    assert (pool.available, pool.evictions) == (3, 0)


@pytest.mark.parametrize(("total", "size", "name"), [(0, 16, "total_blocks is 0"), (4, 0, "block_tokens is 0")])
def test_bounds_are_named(total: int, size: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be at least 1"):
        BlockPool(total, size)


def damage_references(pool: BlockPool) -> None:
    pool._references[0] += 1


def damage_free(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def damage_lost(pool: BlockPool) -> None:
    pool._free.pop()


def damage_index(pool: BlockPool) -> None:
    pool._index.pop(next(iter(pool._index)))


def damage_order(pool: BlockPool) -> None:
    pool._cached.move_to_end(next(iter(pool._cached)))


def damage_extra(pool: BlockPool) -> None:
    pool._index[99, (1,)] = 0


def damage_parent(pool: BlockPool) -> None:
    root = next(content for content in pool._index if content[0] == -1)
    pool._content[pool._index.pop(root)] = None


@pytest.mark.parametrize(
    "damage",
    [damage_references, damage_free, damage_lost, damage_index, damage_order, damage_extra, damage_parent],
)
def test_check_sees(damage: Any) -> None:
    pool = BlockPool(6, 1)
    held = filled(pool, (5, 6))
    pool.release(filled(pool, (1, 2)))
    pool.check([held])
    damage(pool)
    with pytest.raises(RuntimeError, match="BlockPool"):
        pool.check([held])


def test_check_sees_a_leak() -> None:
    pool = BlockPool(6, 1)
    held = filled(pool, (5, 6))
    with pytest.raises(RuntimeError, match="has 1 references and 0 holders"):
        pool.check()
    pool.release(held)
    pool.check()


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(1, 12),
    size=st.integers(1, 3),
    rows=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(0, 5)), max_size=30),
)
def test_random_rows_against_a_memory(total: int, size: int, rows: list[tuple[list[int], int]]) -> None:
    """Rows come, share what is known, compute the rest and leave in any order; a block's content is always right."""
    pool = BlockPool(total, size)
    memory: dict[int, tuple[int, ...]] = {}  # block: all tokens from the row's beginning to the block's end
    live: list[tuple[int, ...]] = []
    for prompt, leaving in rows:
        tokens = tuple(prompt)
        blocks, matched = pool.match_prefix(tokens)
        assert matched == len(blocks) * size < len(tokens)
        for index, block in enumerate(blocks):
            assert memory[block] == tokens[: (index + 1) * size]
        pool.acquire(blocks)
        missing = -(-len(tokens) // size) - len(blocks)
        if missing > pool.available:
            pool.release(blocks)
        else:
            table = list(blocks + pool.allocate(missing))
            for index in range(len(blocks), len(tokens) // size):
                assert not any(table[index] in other for other in live), "nobody else holds a new block"
                memory[table[index]] = tokens[: (index + 1) * size]
                content = tokens[index * size : (index + 1) * size]
                table[index] = pool.publish(table[index], table[index - 1] if index else None, content)
                assert memory[table[index]] == tokens[: (index + 1) * size]
            live.append(tuple(table))
        pool.check(live)
        if live and leaving < len(live):
            pool.release(live.pop(leaving))
            pool.check(live)
    for row in live:
        pool.release(row)
    pool.check()
    assert pool.free + pool.cached == total
