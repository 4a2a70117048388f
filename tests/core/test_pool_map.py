"""The map of a pool names each block's state, and looks at no more blocks than it may."""

from __future__ import annotations

from trident_llm.core.block_pool import BlockPool, block_hash
from trident_llm.core.pool_map import pool_map


def test_every_state_has_its_name() -> None:
    pool = BlockPool(9, 4)
    one, two, three, four, five = pool.allocate(5)
    pool.share([two])
    pool.register(three, block_hash(b"parent", [1, 2, 3, 4]))
    pool.release([three], last_step=0)
    pool.release([four], last_step=1)  # that step is under way
    assert [block.block_id for block in (one, two, three, four, five)] == [1, 2, 3, 4, 5]
    stride, runs = pool_map(pool)
    assert stride == 1
    assert runs == [
        ("held", 1), ("shared", 1), ("cached", 1), ("fenced", 1), ("held", 1), ("free", 3),
    ]  # fmt: skip
    assert sum(count for _, count in runs) == len(pool.blocks) - 1


def test_a_large_pool_is_sampled() -> None:
    pool = BlockPool(1 + 1000, 4)
    pool.allocate(500)
    assert pool_map(pool, max_shown=100) == (10, [("held", 50), ("free", 50)])
    # A block more, and one more of each ten is left out, never more shown than may be.
    stride, runs = pool_map(BlockPool(1 + 1001, 4), max_shown=100)
    assert (stride, runs) == (11, [("free", 91)])
