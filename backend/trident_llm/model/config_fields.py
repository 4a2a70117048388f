"""Typed access to the keys of a model's configuration.

Owns the checks of single values. It knows nothing of what the keys mean. Invariant: a value of the
wrong type never gets further; the error names its key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trident_llm.core.errors import ConfigError


class ModelConfigError(ConfigError):
    """The model's configuration asks for something this engine does not do, or contradicts itself."""


@dataclass(frozen=True)
class Fields:
    """Typed access to config.json; an absent key takes the architecture's default."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def raw(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, self.defaults.get(name, default))

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        value = self.raw(name)
        return None if value is None else to_integer(name, value, minimum)

    def integer(self, name: str, default: int | None = None) -> int:
        return to_integer(name, self.raw(name, default), 1)

    def number(self, name: str, default: float) -> float:
        return to_number(name, self.raw(name, default))

    def boolean(self, name: str) -> bool:
        value = self.raw(name, False)
        if value is not None and not isinstance(value, bool):
            raise ModelConfigError(f"{name}: must be true or false, got {value!r}")
        return bool(value)


def to_integer(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ModelConfigError(f"{name}: must be an integer of at least {minimum}, got {value!r}")
    return value


def to_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ModelConfigError(f"{name}: must be a finite number of at least 0, got {value!r}")
    return float(value)
