"""Tile sizes of the attention kernel, chosen by architecture and shape; nothing is tuned at run time.

The sizes follow from arithmetic and from what compiles without spilling (`python -m
trident_kernels.triton.aot`). They were never timed: `python -m trident_kernels.triton.tune` does that
on a GPU and prints the lines to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from trident_kernels.triton.runtime import Device, power_of_two

MAX_SPLITS = 32
MIN_KEYS_OF_SPLIT = 256
PROGRAMS_PER_SM = 2
WORKSPACE_ELEMENTS = 1 << 24  # float32: 64 MiB of partial results at most
_SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class AttentionConfig:
    """How one program of the attention kernel works."""

    block_m: int  # rows: tokens times the query heads of one kv head
    tile: int  # keys at a time
    num_warps: int
    num_stages: int


# Rows for a few tokens, and for prompts. Each by (architecture from, bytes of a value, padded
# head_dim up to), the first line that fits.
DECODE = (
    (80, 2, 128, AttentionConfig(16, 64, 4, 4)),
    (80, 2, 256, AttentionConfig(16, 32, 4, 3)),
    (80, 4, 64, AttentionConfig(16, 32, 4, 2)),
    (80, 4, 256, AttentionConfig(16, 16, 4, 2)),
)
PREFILL = (
    (120, 2, 128, AttentionConfig(128, 32, 8, 3)),
    (90, 2, 128, AttentionConfig(128, 64, 8, 3)),
    (90, 2, 256, AttentionConfig(64, 32, 8, 2)),
    (80, 2, 64, AttentionConfig(64, 64, 4, 2)),
    (80, 2, 128, AttentionConfig(128, 32, 8, 3)),
    (80, 2, 256, AttentionConfig(64, 32, 8, 2)),
    (80, 4, 64, AttentionConfig(64, 32, 8, 2)),
    (80, 4, 128, AttentionConfig(32, 16, 8, 2)),
    (80, 4, 256, AttentionConfig(16, 16, 8, 2)),
)


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that one program may use."""
    return _SHARED_MEMORY.get(arch, min(_SHARED_MEMORY.values()))


def attention_config(
    device: Device, itemsize: int, head_dim: int, rows: int, deterministic: bool
) -> AttentionConfig:
    """The sizes for programs that could use ``rows`` rows: tokens of a sequence times the group.

    With ``deterministic`` they do not depend on the rows, so a token's sums are the same in any batch.
    """
    width = max(64, power_of_two(head_dim))
    if width > 256:
        raise ValueError(f"head_dim must be at most 256 for the Triton kernels, not {head_dim}")
    table = DECODE if rows <= 16 or deterministic else PREFILL
    for arch, size, widest, config in table:
        if device.arch >= arch and itemsize <= size and width <= widest:
            return config
    raise ValueError(f"the Triton kernels need compute capability 8.0, not {device.arch / 10}")


def num_splits(device: Device, programs: int, max_seq_len: int, elements: int) -> int:
    """Into how many parts each sequence's keys are split, so that few programs fill the device.

    Args:
        programs: that there are without splitting.
        elements: of the output, of which each part needs a float32 copy.
    """
    if programs <= 0:
        return 1
    wanted = min(
        device.num_sms * PROGRAMS_PER_SM // programs,
        max_seq_len // MIN_KEYS_OF_SPLIT,
        WORKSPACE_ELEMENTS // max(1, elements),
        MAX_SPLITS,
    )
    return max(1, wanted)
