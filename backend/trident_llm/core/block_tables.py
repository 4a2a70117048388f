"""Which blocks a sequence has: how its table grows, is shared, and meets the prefix cache.

Owns the block fields of sequences (``blocks``, ``block_hashes``, ``num_registered_blocks``,
``num_sent_blocks``). It must not know who is scheduled, or why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf

from trident_llm.core.block_pool import Block, BlockPool, block_hash, blocks_for, root_hash
from trident_llm.core.config import SchedulerConfig
from trident_llm.core.messages import BlockCopy
from trident_llm.core.request import Sequence


class BlockTables:
    """The tables of all sequences over one :class:`BlockPool`."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._config = config
        self._size = config.block_size

    # ---- growing ------------------------------------------------------------------------------

    def _shared_tail(self, seq: Sequence) -> Block | None:
        """The block that the next token goes to, if it is shared and must be copied first."""
        index, offset = divmod(seq.num_computed_tokens, self._size)
        shared = offset > 0 and seq.blocks[index].ref_count > 1
        return seq.blocks[index] if shared else None

    def wanted(self, seq: Sequence, num_tokens: int) -> int:
        """Fresh blocks that ``num_tokens`` more tokens of a sequence take."""
        total = blocks_for(seq.num_computed_tokens + num_tokens, self._size)
        return total - len(seq.blocks) + (self._shared_tail(seq) is not None)

    def wanted_together(self, seqs: SequenceOf[Sequence], num_tokens: int) -> int:
        """Fresh blocks for ``num_tokens`` more of each: a block's last owner writes in place."""
        if len(seqs) == 1:
            return self.wanted(seqs[0], num_tokens)
        total = sum(self.wanted(seq, num_tokens) for seq in seqs)
        owners = Counter(self._shared_tail(seq) for seq in seqs)
        return total - sum(b is not None and b.ref_count == count for b, count in owners.items())

    def grow(self, seq: Sequence, num_tokens: int, step: int) -> tuple[int, BlockCopy | None]:
        """Takes the blocks for ``num_tokens`` more tokens, to be written by ``step``.

        Returns the first column of the table that the device does not know, and the copy that must
        be made before the step writes.
        """
        tail = self._shared_tail(seq)
        total = blocks_for(seq.num_computed_tokens + num_tokens, self._size)
        fresh = self._pool.allocate(total - len(seq.blocks) + (tail is not None))
        first, copy = seq.num_sent_blocks, None
        if tail is not None:
            first = len(seq.blocks) - 1
            copy = BlockCopy(tail.block_id, fresh[0].block_id)
            seq.blocks[first] = fresh.pop(0)
            self._pool.release([tail], step)
        seq.blocks += fresh
        seq.num_sent_blocks = len(seq.blocks)
        return first, copy

    # ---- sharing ------------------------------------------------------------------------------

    def start(self, seq: Sequence, shared: SequenceOf[Block]) -> None:
        """Begins a table with full blocks whose KV is there already, or will be when it is read."""
        self._pool.share(shared)
        seq.blocks = list(shared)
        seq.num_registered_blocks = len(shared)
        seq.num_computed_tokens = len(shared) * self._size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a sequence without blocks all those of its parent, the partial one included."""
        self._pool.share(parent.blocks)
        child.blocks = list(parent.blocks)
        child.block_hashes = list(parent.block_hashes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_sent_blocks = parent.num_sent_blocks
        child.num_computed_tokens = parent.num_computed_tokens

    def rearrange(self, seqs: SequenceOf[Sequence], parents: SequenceOf[int], newest: int) -> None:
        """``seqs[i]`` takes the known tokens and the table that ``seqs[parents[i]]`` has now.

        What nobody keeps is free once step ``newest`` has completed.
        """
        moved = [(seq, seqs[parent]) for seq, parent in zip(seqs, parents) if parent != seq.index]
        # All are shared before any is released, and read before any is changed.
        for _, parent in moved:
            self._pool.share(parent.blocks)
        taken = [
            (
                list(parent.token_ids),
                list(parent.blocks),
                list(parent.block_hashes),
                parent.num_registered_blocks,
                parent.num_sent_blocks,
            )
            for _, parent in moved
        ]
        for (seq, _), values in zip(moved, taken):
            self._pool.release(seq.blocks, newest)
            seq.token_ids, seq.blocks, seq.block_hashes = values[:3]
            seq.num_registered_blocks, seq.num_sent_blocks = values[3:]

    def release(self, seq: Sequence, newest: int) -> None:
        """Gives all blocks back; they are free once step ``newest`` has completed."""
        self._pool.release(seq.blocks, newest)
        seq.blocks = []
        seq.num_registered_blocks = seq.num_sent_blocks = 0

    # ---- the prefix cache ---------------------------------------------------------------------

    def extend_hashes(self, seq: Sequence) -> None:
        """Hashes the full blocks of known tokens that are not hashed yet."""
        if not self._config.enable_prefix_caching:
            return
        size, hashes = self._size, seq.block_hashes
        if not hashes and len(seq.token_ids) >= size:
            parent = root_hash(self._config.cache_identity, size, seq.request.cache_salt)
            hashes.append(block_hash(parent, seq.token_ids[:size]))
        for start in range(len(hashes) * size, len(seq.token_ids) - size + 1, size):
            hashes.append(block_hash(hashes[-1], seq.token_ids[start : start + size]))

    def cached_prefix(self, seq: Sequence) -> list[Block]:
        """Cached blocks of the known tokens; a token to compute alone is always left."""
        if not seq.request.params.reads_prefix_cache:
            return []
        self.extend_hashes(seq)
        most = (seq.num_tokens - seq.num_held_back - 1) // self._size
        return self._pool.match(seq.block_hashes[:most])

    def register_full(self, seq: Sequence) -> list[Block]:
        """Offers the blocks that are full of known tokens to the cache; those that it took."""
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self._size
        if full <= seq.num_registered_blocks or not self._config.enable_prefix_caching:
            return []
        self.extend_hashes(seq)
        taken = [
            seq.blocks[index]
            for index in range(seq.num_registered_blocks, full)
            if self._pool.register(seq.blocks[index], seq.block_hashes[index])
        ]
        seq.num_registered_blocks = full
        return taken
