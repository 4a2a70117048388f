"""Who owns which KV block: reference counts, the free list, and the prefix cache.

The pool hands out block numbers; it never touches the KV itself. All blocks exist from the start, and
each is at any time exactly one of

    reserved   block 0: takes padded writes, read by nobody
    held       ``ref_count`` live block tables hold it
    fenced     no table holds it, but a launched step may still write it
    free       on the free list, least recently used first; with a hash it can still be matched

A full block is matchable from the moment its hash is registered: when its KV is written, or within
the very step that writes it, because every layer writes all of a step's KV before it attends.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than are free; callers check ``num_free`` first."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def most_blocks_of_beams(
    num_prompt_tokens: int, max_tokens: int, width: int, block_size: int
) -> int:
    """Blocks that a beam search may come to hold: for certain only the prompt's full ones are shared.

    The last token of a beam is never an input, so it takes no place.
    """
    shared = num_prompt_tokens // block_size
    total = blocks_for(num_prompt_tokens + max_tokens - 1, block_size)
    return shared + width * (total - shared)


class Block:
    """One block. ``previous``/``following`` link it into the free list while it is free."""

    __slots__ = ("block_hash", "block_id", "fence", "following", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.fence: int | None = None  # step that must complete before it is free
        self.previous: Block | None = None
        self.following: Block | None = None

    @property
    def on_free_list(self) -> bool:
        return self.previous is not None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref={self.ref_count}, hashed={self.block_hash is not None})"


class FreeBlockList:
    """Doubly linked through the blocks themselves, so that any block leaves in O(1)."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.following = self._tail
        self._tail.previous = self._head
        self.count = 0

    def append(self, block: Block) -> None:
        assert not block.on_free_list, f"{block} is on the free list already"
        last = self._tail.previous
        assert last is not None
        last.following = block
        block.previous = last
        block.following = self._tail
        self._tail.previous = block
        self.count += 1

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.following
        assert before is not None and after is not None, f"{block} is not on the free list"
        before.following = after
        after.previous = before
        block.previous = block.following = None
        self.count -= 1

    def pop(self) -> Block:
        first = self._head.following
        assert first is not None
        if first is self._tail:
            raise PoolExhaustedError("no free KV block is left")
        self.remove(first)
        return first

    def __iter__(self) -> Iterator[Block]:
        block = self._head.following
        while block is not None and block is not self._tail:
            yield block
            block = block.following


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + struct.pack("<Q", len(payload)) + payload


def root_hash(identity: Sequence[str], block_size: int, salt: str, adapter: str = "") -> bytes:
    """The hash that a request's first block descends from.

    Every part is tagged and length-prefixed, so that no two different sets of parts collide: a salt
    "x" without an adapter is not an adapter "x" without a salt.
    """
    digest = hashlib.sha256(b"trident kv root\0")
    for part in identity:
        digest.update(_tagged(b"I", part.encode()))
    digest.update(_tagged(b"B", struct.pack("<Q", block_size)))
    digest.update(_tagged(b"S", salt.encode()))
    digest.update(_tagged(b"A", adapter.encode()))
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent's hash and the block's token ids at full width."""
    digest = hashlib.sha256(b"trident kv block\0" + parent)
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    return digest.digest()


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens; block 0 is reserved."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        assert num_blocks >= 2, "the pool needs block 0 and at least one more"
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockList()
        for block in self.blocks[1:]:
            self._free.append(block)
        self._by_hash: dict[bytes, Block] = {}
        self._fenced: deque[tuple[int, Block]] = deque()
        self._num_fenced = 0
        self._completed_step = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self._free.count

    @property
    def num_fenced(self) -> int:
        """Blocks that will be free once the steps in flight have completed."""
        return self._num_fenced

    @property
    def num_held(self) -> int:
        return len(self.blocks) - 1 - self._free.count - self._num_fenced

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix can match, held or free."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[Block]:
        """``count`` blocks with one reference each; what they cached is forgotten.

        Raises:
            PoolExhaustedError: fewer are free; then none is taken.
        """
        if count > self._free.count:
            raise PoolExhaustedError(f"{count} KV blocks wanted, {self._free.count} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.forget(block)
            block.ref_count = 1
        return taken

    def match(self, hashes: Iterable[bytes]) -> list[Block]:
        """The longest run of cached blocks, from the first hash on; takes no reference."""
        matched: list[Block] = []
        if self.enable_prefix_caching:
            for key in hashes:
                block = self._by_hash.get(key)
                if block is None:
                    break
                matched.append(block)
        return matched

    def share(self, blocks: Iterable[Block]) -> None:
        """Takes one more reference to each block, cached or held."""
        for block in blocks:
            if block.ref_count == 0:
                if block.on_free_list:
                    self._free.remove(block)
                else:
                    assert block.fence is not None, f"{block} is nowhere"
                    block.fence = None
                    self._num_fenced -= 1
            block.ref_count += 1

    def release(self, blocks: Sequence[Block], last_step: int) -> None:
        """Drops one reference to each block of a table, given in table order.

        ``last_step`` is the newest launched step that may write them: a block whose last reference
        goes is free once that step has completed. The tail is returned first, so that the head of a
        prefix, which more requests can match, is evicted last.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} is released more often than it is held"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if last_step <= self._completed_step:
                self._free.append(block)
            else:
                block.fence = last_step
                self._fenced.append((last_step, block))
                self._num_fenced += 1

    def complete_step(self, step: int) -> None:
        """The step and all before it are done: blocks fenced by them become free."""
        self._completed_step = max(self._completed_step, step)
        while self._fenced and self._fenced[0][0] <= self._completed_step:
            fence, block = self._fenced.popleft()
            if block.fence == fence and block.ref_count == 0:
                block.fence = None
                self._num_fenced -= 1
                self._free.append(block)

    def register(self, block: Block, key: bytes) -> bool:
        """Makes a full block matchable; false if an equal block is cached already."""
        assert block.ref_count > 0, f"{block} is not held"
        if not self.enable_prefix_caching or key in self._by_hash:
            return False
        assert block.block_hash is None, f"{block} holds other tokens' KV"
        block.block_hash = key
        self._by_hash[key] = block
        return True

    def forget(self, block: Block) -> None:
        """The block can no longer be matched."""
        if block.block_hash is not None:
            del self._by_hash[block.block_hash]
            block.block_hash = None

    def forget_hashes(self, hashes: Iterable[bytes]) -> None:
        """No block with one of these can be matched any more, whoever holds it."""
        for key in hashes:
            block = self._by_hash.get(key)
            if block is not None:
                self.forget(block)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block; held ones stay with their sequences."""
        for block in list(self._by_hash.values()):
            self.forget(block)

    def check_integrity(self, tables: Iterable[Sequence[Block]] = ()) -> list[str]:
        """What is wrong with the pool, given all live block tables; empty when all is well."""
        problems: list[str] = []
        references = [0] * len(self.blocks)
        for table in tables:
            for block in table:
                references[block.block_id] += 1
        listed: set[int] = set()
        for block in self._free:
            if block.block_id in listed:
                problems.append(f"block {block.block_id} is on the free list twice")
                break
            listed.add(block.block_id)
            following = block.following
            if following is None or following.previous is not block:
                problems.append(f"the free list is broken at block {block.block_id}")
                break
        if len(listed) != self._free.count:
            problems.append(f"{len(listed)} blocks on the free list, {self._free.count} counted")
        fenced = 0
        for block in self.blocks:
            states = (block.ref_count > 0) + block.on_free_list + (block.fence is not None)
            fenced += block.fence is not None
            if block.block_id == 0:
                if states or block.block_hash is not None:
                    problems.append("block 0 is not reserved any more")
                continue
            if states != 1:
                problems.append(f"{block} is in {states} states at once")
            if block.ref_count != references[block.block_id]:
                problems.append(f"{block} is held by {references[block.block_id]} tables")
            if block.block_hash is not None and self._by_hash.get(block.block_hash) is not block:
                problems.append(f"{block} has a hash that the cache does not know")
        if fenced != self._num_fenced:
            problems.append(f"{fenced} blocks are fenced, {self._num_fenced} counted")
        for key, block in self._by_hash.items():
            if block.block_hash != key:
                problems.append(f"the cache maps a foreign hash to {block}")
        return problems
