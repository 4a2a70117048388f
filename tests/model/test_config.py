"""Reading config.json and generation_config.json: defaults, spellings, refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from trident_llm.model.config import (
    ModelConfig,
    ModelConfigError,
    expected_tensors,
    weight_bytes,
)

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("architecture", "reference"),
    [
        ("LlamaForCausalLM", transformers.LlamaConfig()),
        ("MistralForCausalLM", transformers.MistralConfig()),
        ("Qwen2ForCausalLM", transformers.Qwen2Config()),
        ("Qwen3ForCausalLM", transformers.Qwen3Config()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absent_keys_take_the_defaults_of_transformers(architecture: str, reference: Any) -> None:
    config = ModelConfig.from_dict({"architectures": [architecture]})
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == getattr(reference, "head_dim", 128)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.bos_token_id == reference.bos_token_id
    end = reference.eos_token_id
    assert config.eos_token_ids == (() if end is None else (end,))
    window = reference.sliding_window if architecture == "MistralForCausalLM" else None
    assert set(config.sliding_windows) == {window}
    assert config.attention_bias == (architecture == "Qwen2ForCausalLM")
    assert not config.attention_output_bias
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")
    assert config.dtype is None


def test_model_type_alone_is_enough() -> None:
    assert ModelConfig.from_dict({"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_null_head_dim_means_hidden_over_heads() -> None:
    config = ModelConfig.from_dict({**QWEN3, "head_dim": None})
    assert config.head_dim == 4096 // 32


def test_null_kv_heads_means_as_many_as_heads() -> None:
    config = ModelConfig.from_dict(
        {"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}
    )
    assert config.num_kv_heads == 32


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 10.0,
            "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
    ],
    ids=str,
)
def test_rope_spellings(spelling: dict[str, Any]) -> None:
    rope = ModelConfig.from_dict({**LLAMA, **spelling}).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("linear", 5e5, 2.0)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.5}, 2500),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        (YARN, 2048),
        ({**YARN, "factor": None}, 1000),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            1000,
        ),
    ],
    ids=str,
)
def test_longest_supported_sequence(rope: dict[str, Any], longest: int) -> None:
    config = ModelConfig.from_dict(
        {**LLAMA, "max_position_embeddings": 1000, "rope_parameters": rope}
    )
    assert config.max_supported_len == longest


def test_qwen_windows() -> None:
    def windows(**keys: Any) -> tuple[int | None, ...]:
        return ModelConfig.from_dict(
            {**QWEN3, "num_hidden_layers": 3, "sliding_window": 16, **keys}
        ).sliding_windows

    assert windows() == (None, None, None)
    assert windows(use_sliding_window=False, max_window_layers=0) == (None, None, None)
    assert windows(use_sliding_window=True, max_window_layers=2) == (None, None, 16)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=kinds) == (16, None, 16)


def test_end_ids_come_from_both_files_and_defaults_from_generation_config() -> None:
    generation = {
        "eos_token_id": [7, 9, 7],
        "temperature": 0.6,
        "top_k": 0,
        "top_p": None,
        "transformers_version": "4.42.3",
    }
    config = ModelConfig.from_dict({**LLAMA, "eos_token_id": 2}, generation)
    assert config.eos_token_ids == (7, 9, 2)  # the end of a turn, and that of a text
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 0}
    assert ModelConfig.from_dict({**LLAMA, "eos_token_id": [4, 5]}).eos_token_ids == (4, 5)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16", "torch_dtype": "float32"}, "float16"),
    ],
)
def test_dtype_spellings(keys: dict[str, str], dtype: str) -> None:
    assert ModelConfig.from_dict({**LLAMA, **keys}).dtype == dtype


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'.*supported are Llama"),
        ({"model_type": "gemma"}, "architectures: 'gemma'"),
        ({**LLAMA, "quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "torch_dtype: 'float8_e4m3fn'"),
        ({**LLAMA, "num_key_value_heads": 3}, r"num_attention_heads \(32\) must be a multiple"),
        ({**LLAMA, "hidden_size": 100}, r"hidden_size \(100\)"),
        ({**LLAMA, "vocab_size": "32000"}, "vocab_size: must be an integer"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias: must be true or false"),
        ({**LLAMA, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**LLAMA, "rope_scaling": {"type": "longrope"}}, "rope_type: 'longrope'.*llama3"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: required"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
        (
            {**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1}},
            r"rope_scaling\.high_freq_factor: required",
        ),
        ({**LLAMA, "rope_scaling": {**YARN, "truncate": "no"}}, "truncate"),
        (
            {**LLAMA, "rope_scaling": {**YARN, "original_max_position_embeddings": "512"}},
            "original_max_position_embeddings: must be an integer",
        ),
        ({**LLAMA, "rope_parameters": {"full_attention": {}}}, "differs per layer"),
        ({**LLAMA, "rope_theta": 1}, "rope_theta: must be above 1"),
        ({**LLAMA, "partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({**QWEN3, "layer_types": ["full_attention"]}, "layer_types: must be a list of 32"),
        ({**QWEN3, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "'linear_att"),
        (
            {**LLAMA, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "not part of llama",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "layers that differ are not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(config)


def test_folder_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 5}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    config = ModelConfig.from_folder(tmp_path)
    assert (config.num_layers, config.eos_token_ids) == (5, (8,))


@pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff\xfe"])
def test_unreadable_config_names_the_file(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelConfigError, match=str(tmp_path)):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_equal_the_parameters_of_transformers(tied: bool) -> None:
    keys: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "attention_bias": True, "tie_word_embeddings": tied,
    }  # fmt: skip
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**keys))
    config = ModelConfig.from_dict({**QWEN3, **keys})
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert expected_tensors(config) == parameters
    count = sum(math.prod(shape) for shape in parameters.values())
    assert weight_bytes(config, "bfloat16") == 2 * count
    assert weight_bytes(config, "float32") == 4 * count


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, trident_llm.model.config, trident_llm.model.default_model as d; "
    done = subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"])
    assert done.returncode == 0
