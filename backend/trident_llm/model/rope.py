"""Rotary position embedding tables, numerically as Hugging Face transformers computes them.

Owns the frequencies of every supported RoPE type and the table of cosines and sines that the
attention kernels read. It knows nothing of batches or caches. Invariant: everything is float32, the
first half of a table row is cosines and the second half sines, both already multiplied by the
attention scaling.
"""

from __future__ import annotations

import math

import torch

from trident_llm.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Rotation per position of each dimension pair, [rotary_dim / 2] float32, in radians.

    For dynamic NTK: the frequencies of sequences within the original length.
    """
    inv_freq = 1.0 / (rope.theta ** _exponents(rope))
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.rope_type == "yarn":
        return _yarn(rope)
    return inv_freq


def attention_scaling(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's attention temperature, else 1.

    YaRN (https://arxiv.org/abs/2309.00071), equation 22; the mscales are DeepSeek's extension.
    """
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def cos_sin_table(rope: RopeConfig, length: int) -> torch.Tensor:
    """Cosines and sines of positions 0 to ``length`` - 1, [length, rotary_dim] float32 on CPU."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_scaling(rope)


def dynamic_cos_sin(
    rope: RopeConfig, positions: torch.Tensor, rope_lens: torch.Tensor
) -> torch.Tensor:
    """Cosines and sines per token under dynamic NTK scaling, [T, rotary_dim] float32.

    ``positions`` and ``rope_lens`` are [T] int64; rope_lens is the sequence length a token's
    rotation is computed for. Above the original length L the base becomes
    theta * (factor * length / L - (factor - 1)) ** (dim / (dim - 2)).
    """
    dim, original = rope.rotary_dim, rope.original_max_position_embeddings
    lengths = rope_lens.clamp(min=original).to(torch.float32)
    growth = (rope.factor * lengths / original) - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    inv_freq = 1.0 / (base[:, None] ** _exponents(rope).to(positions.device))
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    low, high = rope.low_freq_factor, rope.high_freq_factor
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inv_freq
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    scaled = torch.where(wavelengths > original / low, inv_freq / rope.factor, blended)
    return torch.where(wavelengths < original / high, inv_freq, scaled)


def _yarn(rope: RopeConfig) -> torch.Tensor:
    """YaRN's "NTK-by-parts": a linear ramp over the dimensions between two rotation counts."""
    dim = rope.rotary_dim

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    pos_freqs = rope.theta ** _exponents(rope)
    extrapolation = 1 - ramp
    return (1.0 / (rope.factor * pos_freqs)) * (1 - extrapolation) + (
        1.0 / pos_freqs
    ) * extrapolation


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
