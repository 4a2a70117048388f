from __future__ import annotations

from typing import Any

import pytest

from trident_llm.core.config import EngineConfig, parse_engine_config, setting_help
from trident_llm.core.errors import ConfigError


def test_values_may_be_strings() -> None:
    config, warnings = parse_engine_config(
        {
            "model": "/m",
            "block_size": "32",
            "enable_prefix_caching": "false",
            "gpu_memory_utilization": "0.5",
            "max_model_len": None,
        }
    )
    assert config == EngineConfig(
        model="/m", block_size=32, enable_prefix_caching=False, gpu_memory_utilization=0.5
    )
    assert warnings == []


def test_vllms_settings_that_do_not_apply_warn_and_its_other_names_work() -> None:
    config, warnings = parse_engine_config(
        {"model": "/m", "enforce_eager": True, "num_gpu_blocks_override": 96}
    )
    assert config.num_blocks == 96
    assert len(warnings) == 1
    assert "enforce_eager" in warnings[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", "x"),
        ("block_size", True),
        ("block_size", 1.5),
        ("num_blocks", 1),
        ("dtype", "int3"),
        ("enable_prefix_caching", "maybe"),
        ("gpu_memory_utilization", 1.5),
        ("launch_depth", 3),
        ("tensor_parallel_size", 2),
        ("quantization", "awq"),
        ("max_logprobs", 1000),
        ("drain_seconds", -1),
        ("model", 5),
        ("no_such_setting", 1),
    ],
)
def test_a_bad_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_engine_config({"model": "/m", name: value})


def test_every_setting_is_explained() -> None:
    assert all(len(text) > 10 for text in setting_help().values())
