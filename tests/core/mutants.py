"""Faults that the core could have, each as a change of its source, and a way to run tests on one.

A mutant's modules are imported anew beside the real ones, together with the tests that use them; the
real ones are back when the ``with`` block ends.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

CORE = "trident_llm.core"
RELOADED = (CORE, "tests.core")


class Mutant(NamedTuple):
    name: str
    module: str  # in the core
    old: str  # found exactly once in its source
    new: str
    is_single_case: bool = False  # random operations meet it too rarely: a test of one case has it


MUTANTS = [
    Mutant(
        "a reference is not dropped", "block_pool",
        "            block.ref_count -= 1\n            if block.ref_count:",
        "            block.ref_count -= block.ref_count == 1\n            if block.ref_count:",
    ),
    Mutant(
        "a block is freed while it is shared", "block_pool",
        "            if block.ref_count:\n                continue",
        "            if block.ref_count > 1:\n                continue",
    ),
    Mutant(
        "a fenced block is freed twice", "block_pool",
        "            if block.fence == fence and block.ref_count == 0:",
        "            if block.fence == fence or block.ref_count == 0:", True,
    ),
    Mutant(
        "blocks return before their step has completed", "block_pool",
        "            if last_step <= self._completed_step:",
        "            if last_step <= self._completed_step + 1:",
    ),
    Mutant(
        "a fenced block that is shared again is freed all the same", "block_pool",
        "                    block.fence = None\n                    self._num_fenced -= 1\n            block",
        "                    self._num_fenced -= 1\n            block", True,
    ),
    Mutant(
        "a hit leaves the block on the free list", "block_pool",
        "                if block.on_free_list:\n                    self._free.remove(block)",
        "                if block.on_free_list:\n                    pass",
    ),
    Mutant(
        "a block keeps its hash when it is reused", "block_pool",
        "            self.forget(block)\n            block.ref_count = 1",
        "            block.ref_count = 1",
    ),
    Mutant(
        "hashes leave the salt out", "block_pool",
        '_tagged(b"S", salt.encode())', '_tagged(b"S", b"")',
    ),
    Mutant(
        "hashes leave the block before out", "block_pool",
        'b"trident kv block\\0" + parent', 'b"trident kv block\\0"',
    ),
    Mutant(
        "a match goes on past a gap", "block_pool",
        "                if block is None:\n                    break",
        "                if block is None:\n                    continue", True,
    ),
    Mutant(
        "copy-on-write is skipped", "block_tables",
        "        shared = offset > 0 and seq.blocks[index].ref_count > 1",
        "        shared = offset > 0 and seq.blocks[index].ref_count > 99",
    ),
    Mutant(
        "the copied block is not released", "block_tables",
        "            self._pool.release([tail], step)", "            pass",
    ),
    Mutant(
        "the block copied to is not told to the device", "block_tables",
        "            first = len(seq.blocks) - 1\n", "",
    ),
    Mutant(
        "a table grows one block too few", "block_tables",
        "        total = blocks_for(seq.num_computed_tokens + num_tokens, self._size)\n        fresh",
        "        total = blocks_for(seq.num_computed_tokens + num_tokens - 1, self._size)\n        fresh",
    ),
    Mutant(
        "a forked child takes no reference", "block_tables",
        "        self._pool.share(parent.blocks)\n        child", "        child",
    ),
    Mutant(
        "beams that move release before they share", "block_tables",
        "        for _, parent in moved:\n            self._pool.share(parent.blocks)\n        taken",
        "        taken",
    ),
    Mutant(
        "a hit covers the whole prompt", "block_tables",
        "        most = (seq.num_tokens - seq.num_held_back - 1) // self._size",
        "        most = (seq.num_tokens - seq.num_held_back) // self._size",
    ),
    Mutant(
        "a block with a token not known yet is cached", "block_tables",
        "        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self._size",
        "        full = -(-min(seq.num_computed_tokens, len(seq.token_ids)) // self._size)",
    ),
    Mutant(
        "a request that must not read the cache does", "block_tables",
        "        if not seq.request.params.reads_prefix_cache:\n            return []\n", "", True,
    ),
    Mutant(
        "the budget is off by one", "scheduler",
        "        budget = self.config.max_num_batched_tokens\n        preempted",
        "        budget = self.config.max_num_batched_tokens + 1\n        preempted",
    ),
    Mutant(
        "decoded tokens are not taken from the budget", "scheduler",
        "                    budget -= self._schedule_running(step, due, 1, done)",
        "                    self._schedule_running(step, due, 1, done)",
    ),
    Mutant(
        "what is released is fenced by the oldest step", "scheduler",
        "        return self._in_flight[-1].output.step if self._in_flight else 0",
        "        return self._in_flight[0].output.step if self._in_flight else 0",
    ),
    Mutant(
        "what is released is not fenced", "scheduler",
        "        return self._in_flight[-1].output.step if self._in_flight else 0",
        "        return 0",
    ),
    Mutant(
        "a placeholder is not counted", "scheduler",
        "            seq.num_placeholders += 1\n", "            pass\n",
    ),
    Mutant(
        "a forked child has no placeholder", "scheduler",
        "            child.num_placeholders = 1\n", "",
    ),
    Mutant(
        "a resumed sequence is never protected", "scheduler",
        "            seq.num_resumed_blocks = blocks_for(seq.num_tokens, self.config.block_size)",
        "            seq.num_resumed_blocks = 0", True,
    ),
    Mutant(
        "a preempted sequence keeps its row and blocks", "scheduler",
        "                self.running.remove(seq)\n                self._release(seq)\n",
        "                self.running.remove(seq)\n",
    ),
    Mutant(
        "a preempted sequence still counts as computed", "scheduler",
        "                seq.status = RequestStatus.WAITING\n                seq.num_computed_tokens = 0\n",
        "                seq.status = RequestStatus.WAITING\n",
    ),
    Mutant(
        "the rows of children are not reserved", "scheduler",
        "        if 1 + len(children) > len(self._free_rows):",
        "        if not self._free_rows:",
    ),
    Mutant(
        "blocks promised to running sequences are given away", "scheduler",
        "        if wanted + promised + spare > free:", "        if wanted > free + 1:",
    ),
    Mutant(
        "waiting sequences are overtaken without end", "scheduler",
        "                waiting.overtaken += 1", "                waiting.overtaken += 0",
    ),
    Mutant(
        "priority is ignored", "scheduler",
        "        priority = seq.request.params.priority if by_priority else 0",
        "        priority = 0",
    ),
    Mutant(
        "a more urgent sequence is preempted", "scheduler",
        "            least_urgent = max(s.request.params.priority for s in later)",
        "            least_urgent = min(s.request.params.priority for s in later)",
    ),
    Mutant(
        "an earlier sequence is preempted", "scheduler",
        " and self._order(s) > own]", " and s is not leader]",
    ),
    Mutant(
        "blocks that somebody waits for are given away", "scheduler",
        "                step.num_awaited += wanted\n", "", True,
    ),
    Mutant(
        "prefills leave decoding ones no tokens", "scheduler",
        "        set_aside = sum(len(due) for _, due in turns)",
        "        set_aside = sum(0 for _, due in turns)",
    ),
    Mutant(
        "decoding ones take blocks before what is more urgent", "scheduler",
        "        for seq, due in turns:\n",
        "        for seq, due in sorted(turns, key=lambda turn: not turn[1]):\n",
    ),
    Mutant(
        "the row of a finished sequence is not told", "scheduler",
        "            self._finished_rows.append(seq.row)\n", "",
    ),
    Mutant(
        "a finished sequence keeps its row", "scheduler",
        "            self._free_rows.append(seq.row)\n            seq.row = None\n",
        "            seq.row = None\n",
    ),
    Mutant(
        "tokens of an ended sequence are shown", "scheduler",
        "            if seq.status is RequestStatus.FINISHED:\n                continue\n            if seq.request.beams",
        "            if seq.request.beams",
    ),
    Mutant(
        "an aborted parent leaves its children's rows behind", "scheduler",
        "        for child in self._drop_pending_forks(seq):", "        for child in []:",
    ),
    Mutant(
        "blocks of a failed step stay cached", "scheduler",
        "            for block in step.registered:\n                self.pool.forget(block)\n", "",
    ),
    Mutant(
        "blocks of a failed row stay cached", "scheduler",
        "                self.pool.forget_hashes(seq.block_hashes)",
        "                pass", True,
    ),
    Mutant(
        "a sequence goes on past max_tokens", "ends",
        "    if seq.num_output_tokens >= seq.request.max_tokens:",
        "    if seq.num_output_tokens > seq.request.max_tokens:",
    ),
    Mutant(
        "min_tokens counts one short", "ends",
        "    if seq.num_output_tokens >= params.min_tokens:",
        "    if seq.num_output_tokens > params.min_tokens:", True,
    ),
    Mutant(
        "an end token ends although it is to be ignored", "ends",
        "        if not params.ignore_eos and token_id in eos_token_ids:",
        "        if token_id in eos_token_ids:", True,
    ),
    Mutant(
        "a lone beam decodes ahead of the others", "group",
        "    return beams if ready else []", "    return [b for b in beams if b.num_remaining == 1]",
    ),
    Mutant(
        "beams are taken to share their newest token", "group",
        "    for index, (one, other) in enumerate(zip(first[:-1], last[:-1])):\n        if one != other:\n            return index\n    return len(first) - 1",
        "    return len(first) - 1",
    ),
    Mutant(
        "a search of less than its width goes on with less", "beam",
        "        choices += [copy] * (self.width - len(choices))\n", "",
    ),
    Mutant(
        "an end beyond the best beams counts", "beam",
        "            elif rank < self.width:", "            else:",
    ),
    Mutant(
        "the length penalty is ignored", "beam",
        "                score = logprob / length**self._params.length_penalty",
        "                score = logprob / length",
    ),
]  # fmt: skip


class _MutatedFile(SourceFileLoader):
    def __init__(self, mutant: Mutant, path: str) -> None:
        super().__init__(f"{CORE}.{mutant.module}", path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:  # never from a cache, never into one
        source = Path(self.path).read_text()
        found = source.count(self._mutant.old)
        assert found == 1, f"{self._mutant.name}: what it changes is there {found} times"
        source = source.replace(self._mutant.old, self._mutant.new)
        code: CodeType = self.source_to_code(source.encode(), self.path)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != f"{CORE}.{self._mutant.module}":
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        spec.loader = _MutatedFile(self._mutant, spec.origin)
        return spec


def _take_out() -> dict[str, ModuleType]:
    names = [n for n in sys.modules if any(n == r or n.startswith(f"{r}.") for r in RELOADED)]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[Any]:
    """Yields a function that imports modules of the core, or of its tests, with the fault in it."""
    finder = _Finder(mutant)
    real = _take_out()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        sys.modules.update(real)
        for name, module in real.items():
            parent, _, own = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], own, module)
