"""Which tokens a grammar allows, as bits: what the host hands to a step beside its SchedulerOutput."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenMask:
    """Masks of M of a step's L sampled rows.

    lines: ``[M]`` int64, ascending, the places of the masked rows in
    :attr:`~trident_llm.core.messages.SchedulerOutput.sampled_rows`.
    bits: ``[M, ceil(V / 32)]`` int32; token i is allowed if bit ``i % 32`` of word ``i // 32`` is set.
    """

    lines: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]
