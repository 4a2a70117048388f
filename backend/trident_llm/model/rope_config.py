"""What a model's configuration says about rotary position embedding.

Owns the two generations of spellings (``rope_parameters``; ``rope_theta`` and ``rope_scaling``) and
which parameters each type reads. It computes nothing and imports no torch. Invariant: a type or a
required parameter that is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from trident_llm.model.config_fields import ModelConfigError, to_integer, to_number

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its type and the parameters that type reads."""

    rope_type: RopeType
    theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated; even
    factor: float  # 1.0 where the type has none
    original_max_position_embeddings: int  # the length the model was first trained for
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int) -> RopeConfig:
    """RoPE from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``.

    Values inside the dictionary win over top-level ones.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelConfigError(f"rope_scaling: must be an object, got {given!r}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelConfigError("rope_parameters: RoPE that differs per layer is not supported")
    values: dict[str, Any] = {
        "rope_theta": config.get("rope_theta", 10000.0),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        **given,
    }
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelConfigError(
            f"rope_type: {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    rotary_dim = int(head_dim * _optional(values, "partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelConfigError(
            f"partial_rotary_factor: the rotated part of a head must be even and within head_dim "
            f"({head_dim}), got {rotary_dim}"
        )
    theta = _required(values, "rope_theta", kind)
    if theta <= 1.0:
        raise ModelConfigError(f"rope_theta: must be above 1, got {theta}")
    original = max_positions
    if kind in ("llama3", "yarn"):
        original = values.get("original_max_position_embeddings") or max_positions
        # Some models write it beside the dictionary, and there it wins.
        original = config.get("original_max_position_embeddings") or original
        original = to_integer("original_max_position_embeddings", original, 1)
    return RopeConfig(
        rope_type=cast(RopeType, kind),
        theta=theta,
        rotary_dim=rotary_dim,
        original_max_position_embeddings=original,
        **_rope_parameters(values, kind, max_positions / original),
    )


def _rope_parameters(values: dict[str, Any], kind: str, length_ratio: float) -> dict[str, Any]:
    """The parameters that one RoPE type reads besides theta; others are left at their defaults."""
    if kind == "default":
        return {"factor": 1.0}
    if kind == "yarn" and "factor" in values and values["factor"] is None:
        values = {**values, "factor": length_ratio}
    factor = _required(values, "factor", kind)
    if factor < 1.0:
        raise ModelConfigError(f"rope_scaling.factor: must be at least 1, got {factor}")
    if kind == "llama3":
        low = _required(values, "low_freq_factor", kind)
        high = _required(values, "high_freq_factor", kind)
        if not 0 < low < high:
            raise ModelConfigError(
                f"rope_scaling: high_freq_factor ({high}) must be above low_freq_factor ({low})"
            )
        return {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        truncate = values.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ModelConfigError(f"rope_scaling.truncate: must be a boolean, got {truncate!r}")
        return {
            "factor": factor,
            "beta_fast": _optional(values, "beta_fast", 32.0) or 32.0,
            "beta_slow": _optional(values, "beta_slow", 1.0) or 1.0,
            "attention_factor": _optional(values, "attention_factor", None),
            "mscale": _optional(values, "mscale", None),
            "mscale_all_dim": _optional(values, "mscale_all_dim", None),
            "truncate": truncate,
        }
    return {"factor": factor}


def _required(values: Mapping[str, Any], name: str, kind: str) -> float:
    if values.get(name) is None:
        raise ModelConfigError(f"rope_scaling.{name}: required for rope_type {kind!r}")
    return to_number(f"rope_scaling.{name}", values[name])


def _optional(values: Mapping[str, Any], name: str, default: Any) -> Any:
    value = values.get(name)
    return default if value is None else to_number(f"rope_scaling.{name}", value)
