"""Random numbers that depend on nothing but their names: seed, sequence index, position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox_uniform(
    seeds: npt.NDArray[np.uint64],
    sequence_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) with 53 bits per (seed, sequence index, position); all ``[N]``.

    Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11): the seed
    is the key, position and sequence index are the counter.
    """
    c0 = positions.astype(np.uint64) & _LOW
    c1 = positions.astype(np.uint64) >> _SHIFT
    c2 = sequence_indices.astype(np.uint64) & _LOW
    c3 = np.zeros_like(c0)
    k0, k1 = seeds & _LOW, seeds >> _SHIFT
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    bits = ((c0 << _SHIFT) | c1) >> np.uint64(11)
    uniform: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return uniform
