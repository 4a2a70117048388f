"""What each block of a pool is for at one moment, short enough to be looked at every second.

Reads the pool and changes nothing. Call it where the pool stands still: between two steps.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from trident_llm.core.block_pool import Block, BlockPool

MAX_SHOWN = 4096
"""Blocks looked at: a pool of any size takes about a millisecond of a step's time."""


class PoolMap(NamedTuple):
    """Every ``stride``-th block from block 1 on, as runs of (state, number of blocks shown).

    States: ``free``, ``cached`` (free, and still matched by a prefix), ``held`` (by one table),
    ``shared`` (by several), ``fenced`` (free once the steps in flight are done).
    """

    stride: int
    runs: list[tuple[str, int]]


def pool_map(pool: BlockPool, max_shown: int = MAX_SHOWN) -> PoolMap:
    """The map of a pool, of at most ``max_shown`` of its blocks; all of them if they are no more."""
    usable = len(pool.blocks) - 1  # block 0 is never handed out
    stride = -(-usable // max_shown)
    states = map(block_state, pool.blocks[1::stride])
    return PoolMap(stride, [(state, sum(1 for _ in run)) for state, run in groupby(states)])


def block_state(block: Block) -> str:
    """One of the states of :class:`PoolMap`."""
    if block.ref_count:
        return "held" if block.ref_count == 1 else "shared"
    if block.fence is not None:
        return "fenced"
    return "free" if block.block_hash is None else "cached"
