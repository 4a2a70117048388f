"""How many tokens each key may use: a budget that refills steadily, minute by minute.

Owns the counting only. What a request will use is not known before it ends, so a key may ask while a
token is left, and what its requests used is taken off when they end; the budget may go below zero then,
and the key waits until that has refilled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

__all__ = ["TokenBudgets"]


class TokenBudgets:
    """Budgets of one process, by the name of their key.

    per_minute: tokens that a key may use in a minute, and at most at once; 0 is no limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # tokens, and when there were so many

    def seconds_to_wait(self, key: str) -> int:
        """Whole seconds until the key may ask again; 0 if it may now."""
        left = self._refilled(key)
        if not self._per_minute or left >= 1:
            return 0
        return math.ceil((1 - left) * 60 / self._per_minute)

    def charge(self, key: str, tokens: int) -> None:
        """A request of the key has ended that used so many."""
        if self._per_minute and tokens:
            self._left[key] = (self._refilled(key) - tokens, self._clock())

    def _refilled(self, key: str) -> float:
        left, since = self._left.get(key, (self._per_minute, 0.0))
        gained = (self._clock() - since) * self._per_minute / 60
        return min(self._per_minute, left + gained)
