"""The tensors of one forward pass.

A batch is flat: the tokens of all sequences lie one after another, with no padding between them,
prefill chunks and single decode tokens alike. Lengths of one sequence s:

    |<------------------ seq_lens[s] ------------------>|
    |<-- tokens already in the cache -->|<-- query -->|
                                          cu_seqlens_q[s] : cu_seqlens_q[s + 1]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Tensors of one step; T tokens, S sequences, M block-table columns, L logits rows."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    slot_mapping: torch.Tensor  # [T] int64, block_id * block_size + offset that receives its KV
    cu_seqlens_q: torch.Tensor  # [S + 1] int32, prefix sums of the query lengths
    seq_lens: torch.Tensor  # [S] int32, tokens whose KV is present after this step's write
    block_tables: torch.Tensor  # [S, M] int32
    max_seqlen_q: int  # upper bound of the query lengths
    max_seq_len: int  # upper bound of seq_lens
    logits_indices: torch.Tensor  # [L] int64, flat indices of the tokens whose logits are wanted
    rope_lens: torch.Tensor | None = None  # [T] int64, only for length-dependent (dynamic) RoPE
