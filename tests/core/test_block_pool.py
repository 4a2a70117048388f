from __future__ import annotations

import pytest

from trident_llm.core.block_pool import BlockPool, PoolExhaustedError, block_hash, root_hash

ROOT = root_hash(("model", "bfloat16"), 4, "")


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(4)
    assert sorted(block.block_id for block in blocks) == [1, 2, 3, 4]
    with pytest.raises(PoolExhaustedError):
        pool.allocate(1)
    assert pool.check_integrity([blocks]) == []


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(PoolExhaustedError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_the_tail_of_a_released_table_is_reused_first() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    pool.release(table, 0)
    assert [pool.allocate(1)[0] for _ in range(3)] == list(reversed(table))


def test_releasing_more_often_than_held_is_caught() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(1)
    pool.release(table, 0)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table, 0)


def test_a_cached_block_is_matched_until_it_is_allocated_again() -> None:
    pool = BlockPool(3, 2)
    keys = [block_hash(ROOT, [1, 2])]
    table = pool.allocate(1)
    assert pool.register(table[0], keys[0])
    pool.release(table, 0)
    assert pool.match(keys) == table
    pool.share(table)
    assert pool.num_free == 1
    pool.release(table, 0)
    pool.allocate(2)
    assert pool.match(keys) == []


def test_a_match_ends_at_the_first_gap() -> None:
    pool = BlockPool(5, 2)
    first = block_hash(ROOT, [1, 2])
    second = block_hash(first, [3, 4])
    third = block_hash(second, [5, 6])
    table = pool.allocate(3)
    pool.register(table[0], first)
    pool.register(table[2], third)
    assert pool.match([first, second, third]) == table[:1]


def test_an_equal_block_is_not_cached_twice() -> None:
    pool = BlockPool(4, 2)
    key = block_hash(ROOT, [1, 2])
    one, two = pool.allocate(2)
    assert pool.register(one, key)
    assert not pool.register(two, key)
    assert pool.match([key]) == [one]


def test_a_fenced_block_is_free_only_after_its_step() -> None:
    pool = BlockPool(3, 2)
    table = pool.allocate(2)
    pool.release(table, last_step=3)
    assert (pool.num_free, pool.num_fenced) == (0, 2)
    pool.complete_step(2)
    assert pool.num_free == 0
    pool.complete_step(3)
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    assert pool.check_integrity() == []


def test_a_fenced_block_can_be_shared_again_and_is_then_not_freed() -> None:
    pool = BlockPool(3, 2)
    key = block_hash(ROOT, [1, 2])
    table = pool.allocate(1)
    pool.register(table[0], key)
    pool.release(table, last_step=1)
    pool.share(pool.match([key]))
    pool.complete_step(1)
    assert pool.num_held == 1
    assert pool.check_integrity([table]) == []


def test_a_block_that_was_fenced_twice_is_free_once_after_the_later_step() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"key")
    pool.release(blocks, 1)
    pool.share(pool.match([b"key"]))
    pool.release(blocks, 2)
    pool.complete_step(1)
    assert (pool.num_free, pool.num_fenced) == (1, 1)
    pool.complete_step(2)
    assert (pool.num_free, pool.num_fenced) == (2, 0)
    assert pool.check_integrity() == []


def test_without_prefix_caching_nothing_matches() -> None:
    pool = BlockPool(3, 2, enable_prefix_caching=False)
    key = block_hash(ROOT, [1, 2])
    assert not pool.register(pool.allocate(1)[0], key)
    assert pool.match([key]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (root_hash(("m",), 16, "x"), root_hash(("m",), 16, "", adapter="x")),
        (root_hash(("m",), 16, ""), root_hash(("m",), 32, "")),
        (root_hash(("a", "b"), 16, ""), root_hash(("ab",), 16, "")),
        (root_hash(("m",), 16, "x"), root_hash(("m", "x"), 16, "")),
        (block_hash(ROOT, [65]), block_hash(ROOT, [321])),
        (block_hash(ROOT, [100, 31]), block_hash(ROOT, [131, 30])),
        (block_hash(ROOT, [1, 2]), block_hash(block_hash(ROOT, [1]), [2])),
    ],
)
def test_different_parts_never_hash_alike(one: bytes, other: bytes) -> None:
    assert one != other


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(4, 2)
    table = pool.allocate(2)
    assert "held by 0 tables" in "; ".join(pool.check_integrity([table[:1]]))
    table[0].ref_count = 2
    assert pool.check_integrity([table])
