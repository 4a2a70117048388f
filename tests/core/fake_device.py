"""A device that computes nothing but checks everything the scheduler tells it.

The "KV" of a token is a digest of all tokens up to it, so a slot that holds anything but this very
prefix is noticed when a later token attends to it. The "logits" choose a token by digest of the whole
prefix, the seed and the sequence index, so the ids of a sequence do not depend on how it was scheduled.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from trident_llm.core.config import SchedulerConfig
from trident_llm.core.messages import Candidate, SampledRow, SchedulerOutput, StepResult


def digest(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()[:8]


def next_token(token_ids: list[int], seed: int, index: int, vocab: int) -> int:
    return int.from_bytes(digest("next", token_ids, seed, index), "little") % vocab


def candidates(token_ids: list[int], vocab: int) -> list[Candidate]:
    """What may follow in a beam search, the most likely first."""
    found = [
        Candidate(token, -5.0 * int.from_bytes(digest("beam", token_ids, token), "little") / 2**64)
        for token in range(vocab)
    ]
    return sorted(found, key=lambda candidate: -candidate.logprob)


def solo_ids(prompt: list[int], seed: int, index: int, count: int, vocab: int) -> list[int]:
    """The output of a sequence that has the device to itself."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, seed, index, vocab))
    return ids[len(prompt) :]


@dataclass
class Row:
    token_ids: list[int]
    num_computed: int
    seed: int
    index: int
    num_candidates: int = 0  # of a beam
    scores_only: bool = False
    table: list[int] = field(default_factory=list)


class FakeDevice:
    def __init__(self, config: SchedulerConfig, vocab: int = 3) -> None:
        self.config = config
        self.vocab = vocab
        self.kv: list[bytes | None] = [None] * (config.num_blocks * config.block_size)
        self.rows: dict[int, Row] = {}
        self.fail_rows: set[int] = set()
        self.computed_tokens = 0
        self.written: set[int] = set()  # slots, by the newest step

    def launch(self, output: SchedulerOutput) -> StepResult:
        size = self.config.block_size
        for row in output.finished_rows:
            self.rows.pop(row, None)
        before = {parent: self.rows[parent] for _, parent, _ in output.continuations}
        for row, parent, token_id in output.continuations:
            old = before[parent]
            self.rows[row] = replace(
                old, token_ids=[*old.token_ids, token_id], index=row, table=list(old.table)
            )
        for new in output.new_rows:
            assert new.row not in self.rows, "a row is taken twice"
            assert new.num_computed_tokens < len(new.token_ids), "nothing is left to compute"
            params = new.sampling_params
            # Two tokens may end a beam here at the most.
            count = params.num_sequences + 2 if params.use_beam_search else 0
            self.rows[new.row] = Row(
                list(new.token_ids), new.num_computed_tokens, new.seed, new.sequence_index, count,
                params.max_tokens == 0,
            )  # fmt: skip
        for scheduled in output.scheduled_rows:
            table = self.rows[scheduled.row].table
            assert scheduled.first_block <= len(table), "a hole in a block table"
            table[scheduled.first_block : scheduled.first_block + len(scheduled.block_ids)] = (
                scheduled.block_ids
            )
        for source, destination in output.block_copies:
            for offset in range(size):
                self.kv[destination * size + offset] = self.kv[source * size + offset]
        written = self.written = set()
        for scheduled in output.scheduled_rows:  # every KV is written before any token attends
            row = self.rows[scheduled.row]
            assert scheduled.num_tokens > 0
            for position in range(row.num_computed, row.num_computed + scheduled.num_tokens):
                slot = row.table[position // size] * size + position % size
                assert slot >= size, "the reserved block is written"
                assert slot not in written, "two tokens of a step share a slot"
                written.add(slot)
                self.kv[slot] = digest(row.token_ids[: position + 1])
        assert output.num_tokens <= self.config.max_num_batched_tokens
        self.computed_tokens += output.num_tokens
        sampled: list[SampledRow] = []
        for scheduled in output.scheduled_rows:
            row = self.rows[scheduled.row]
            row.num_computed += scheduled.num_tokens
            for position in range(row.num_computed):
                slot = row.table[position // size] * size + position % size
                assert self.kv[slot] == digest(row.token_ids[: position + 1]), "wrong KV is read"
            ends_here = row.num_computed == len(row.token_ids)
            assert scheduled.samples == (ends_here and not row.scores_only)
        for fork in output.forks:
            parent = self.rows[fork.parent_row]
            assert fork.child_row not in self.rows, "a child takes a row in use"
            self.rows[fork.child_row] = Row(
                list(parent.token_ids), parent.num_computed, parent.seed, fork.sequence_index,
                parent.num_candidates, parent.scores_only, list(parent.table),
            )  # fmt: skip
        for number in output.sampled_rows:
            row = self.rows[number]
            if row.num_candidates:
                found = candidates(row.token_ids, self.vocab)[: row.num_candidates]
                failed = number in self.fail_rows
                sampled.append(SampledRow([], candidates=found, failed=failed))
                continue
            token = next_token(row.token_ids, row.seed, row.index, self.vocab)
            row.token_ids.append(token)
            sampled.append(SampledRow([token], failed=number in self.fail_rows))
        return StepResult(output.step, sampled)

    def collect(self, launched: StepResult) -> StepResult:
        return launched
