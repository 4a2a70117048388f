"""Running a decoder through a paged cache, for tests: builds batches as the model runner would."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trident_llm.model.batch import Batch
from trident_llm.model.decoder import Decoder
from trident_llm.model.kv_cache import KVCache

BLOCK_SIZE = 4


@dataclass
class Sequence:
    """Token ids so far, how many of them are in the cache, and the blocks that hold them."""

    ids: list[int]
    num_prompt: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)


class PagedRun:
    """A decoder with a small cache whose blocks are handed out in a scrambled order."""

    def __init__(self, decoder: Decoder, num_blocks: int = 64) -> None:
        config = decoder.config
        self.decoder = decoder
        self.kv = KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=config.num_kv_heads,
            block_size=BLOCK_SIZE,
            head_dim=config.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0))
        self._free = [1 + int(block) for block in order]  # block 0 takes padded writes

    def step(
        self,
        sequences: list[Sequence],
        counts: list[int] | None = None,
        *,
        all_logits: bool = False,
    ) -> torch.Tensor:
        """Computes each sequence's next ``counts`` tokens (default: all that are not computed).

        Returns the logits of each sequence's last token in this step, or of all tokens.
        """
        counts = counts or [len(s.ids) - s.num_computed for s in sequences]
        batch = self._batch(sequences, counts, all_logits)
        for sequence, count in zip(sequences, counts):
            sequence.num_computed += count
        with torch.inference_mode():
            return self.decoder.forward(batch, self.kv)

    def greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Decodes all prompts together, one token a step after a common prefill."""
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        for _ in range(num_tokens):
            for sequence, token in zip(sequences, self.step(sequences).argmax(-1).tolist()):
                sequence.ids.append(token)
        return [sequence.ids[sequence.num_prompt :] for sequence in sequences]

    def _batch(self, sequences: list[Sequence], counts: list[int], all_logits: bool) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rope_lens: list[int] = []
        ends = [0]
        for sequence, count in zip(sequences, counts):
            length = sequence.num_computed + count
            while len(sequence.blocks) * BLOCK_SIZE < length:
                sequence.blocks.append(self._free.pop())
            for position in range(sequence.num_computed, length):
                ids.append(sequence.ids[position])
                positions.append(position)
                rope_lens.append(max(sequence.num_prompt, position + 1))
                block = sequence.blocks[position // BLOCK_SIZE]
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            ends.append(len(ids))
        seq_lens = [s.num_computed + count for s, count in zip(sequences, counts)]
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = [s.blocks + [0] * (width - len(s.blocks)) for s in sequences]
        wanted = list(range(len(ids))) if all_logits else [end - 1 for end in ends[1:]]
        return Batch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            max_seqlen_q=max(counts),
            max_seq_len=max(seq_lens),
            logits_indices=torch.tensor(wanted),
            rope_lens=torch.tensor(rope_lens) if self.decoder.needs_rope_lens else None,
        )
