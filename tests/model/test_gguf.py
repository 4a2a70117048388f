"""GGUF files: against Hugging Face's own loader, against the models they were made of, damaged."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from gguf.constants import RopeScalingType

from tests.model.paged import PagedRun, Sequence
from trident_llm.model.config import ModelConfig, ModelConfigError, expected_tensors
from trident_llm.model.decoder import Decoder
from trident_llm.model.gguf import GgufCheckpoint, GgufError, GgufFile, config_dict
from trident_llm.model.loader import ModelLoadError
from trident_llm.model.rope import inverse_frequencies

Q = GGMLQuantizationType
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# Types that both the gguf package dequantizes and Hugging Face reads.
SHARED_TYPES = [
    Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K,
    Q.Q6_K, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ1_M, Q.IQ4_NL, Q.IQ4_XS,
]  # fmt: skip


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, block, rest = name.split(".", 3)
        part, _, suffix = rest.rpartition(".")
        return f"blk.{block}.{GGUF_NAMES[part]}.{suffix}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def interleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's conversion does to q and k of the llama architecture."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    interleaved: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(values.shape)
    return interleaved


def writer(path: Path, architecture: str, config: Any) -> GGUFWriter:
    """A GGUF with the configuration of a Hugging Face model and no tensors yet."""
    out = GGUFWriter(path, architecture)
    out.add_name("tiny")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    if architecture == "qwen3":
        out.add_key_length(config.head_dim)
        out.add_value_length(config.head_dim)
    return out


def finish(out: GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_model(path: Path, architecture: str, model: Any, kind: Q = Q.F32) -> None:
    out = writer(path, architecture, model.config)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue
        values = parameter.detach().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            config = model.config
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleave(values, heads)
        if values.ndim == 1 or kind == Q.F32:
            out.add_tensor(gguf_name(name), values)
        else:
            out.add_tensor(gguf_name(name), quants.quantize(values, kind), raw_dtype=kind)
    finish(out)


def random_model(config_class: Any, model_class: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    model = model_class(config_class(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def load(path: Path) -> Decoder:
    config = ModelConfig.from_folder(path)
    device = torch.device("cpu")
    return Decoder.load(path, config, dtype=torch.float32, device=device, max_len=64)


@pytest.mark.parametrize(
    ("architecture", "config_class", "model_class", "options"),
    [
        ("llama", transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        (
            "llama",
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        ),
        ("qwen2", transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        ("qwen3", transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
    ],
)
def test_logits_equal_the_model_the_file_was_made_of(
    tmp_path: Path, architecture: str, config_class: Any, model_class: Any, options: dict[str, Any]
) -> None:
    model = random_model(config_class, model_class, **options)
    write_model(tmp_path / "tiny.gguf", architecture, model)
    ids = list(range(3, 60, 4))
    logits = PagedRun(load(tmp_path)).step([Sequence(ids)], all_logits=True)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.F16], ids=lambda kind: kind.name)
def test_tensors_equal_the_loader_of_transformers(tmp_path: Path, kind: Q) -> None:
    model = random_model(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    write_model(tmp_path / "tiny.gguf", "llama", model, kind)
    assert_equals_transformers(tmp_path)


def test_every_block_format_equals_the_loader_of_transformers(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
    )
    write_random_blocks(tmp_path / "blocks.gguf", config, SHARED_TYPES)
    assert_equals_transformers(tmp_path)


def test_block_formats_that_only_the_gguf_package_knows(tmp_path: Path) -> None:
    kinds = [kind for kind in quants._type_traits if kind not in SHARED_TYPES]
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 256})
    blocks = write_random_blocks(tmp_path / "blocks.gguf", config, kinds)
    file = GgufFile(tmp_path / "blocks.gguf")
    assert {tensor.kind for tensor in file.tensors.values()} >= set(kinds)
    for name, (raw, kind) in blocks.items():
        np.testing.assert_array_equal(file.read(name), quants.dequantize(raw, kind))


def test_a_type_without_dequantization_is_refused_by_name(tmp_path: Path) -> None:
    out = GGUFWriter(tmp_path / "odd.gguf", "llama")
    out.add_tensor("x", np.zeros((2, 292), np.uint8), raw_dtype=Q.Q8_K)
    finish(out)
    with pytest.raises(GgufError, match="tensor x has type Q8_K"):
        GgufFile(tmp_path / "odd.gguf").read("x")


def assert_equals_transformers(folder: Path) -> None:
    (path,) = folder.glob("*.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    file = GgufFile(path)
    ours = GgufCheckpoint(file)
    expected = dict(theirs.named_parameters())
    assert set(ours.shapes) == set(expected)
    for name, parameter in expected.items():
        values = torch.from_numpy(ours.read(name).copy())
        torch.testing.assert_close(values, parameter.detach(), rtol=1e-6, atol=1e-6, msg=name)


def write_random_blocks(
    path: Path, config: Any, kinds: list[Q]
) -> dict[str, tuple[np.ndarray[Any, Any], Q]]:
    """A model whose matrices are random blocks of each kind in turn; returns them."""
    generator = np.random.default_rng(11)
    out = writer(path, "llama", config)
    blocks: dict[str, tuple[np.ndarray[Any, Any], Q]] = {}
    model = ModelConfig.from_dict(
        {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    )
    for name, shape in expected_tensors(model).items():
        if len(shape) == 1:
            out.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        kind = kinds[len(blocks) % len(kinds)]
        raw = random_blocks(generator, kind, shape)
        out.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        blocks[gguf_name(name)] = (raw, kind)
    assert len(blocks) >= len(kinds)
    finish(out)
    return blocks


def random_blocks(
    generator: np.random.Generator, kind: Q, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Random bytes whose values are finite and of moderate size, [rows, bytes of a row]."""
    if kind == Q.F32:
        return generator.standard_normal(shape, np.float32)
    if kind == Q.F16:
        return generator.standard_normal(shape, np.float32).astype(np.float16)
    size, width = GGML_QUANT_SIZES[kind]
    count = math.prod(shape) // size
    good = np.empty((0, width), np.uint8)
    with np.errstate(all="ignore"):
        while len(good) < count:
            blocks = generator.integers(0, 256, (4 * count, width), np.uint8)
            values = np.abs(quants.dequantize(blocks, kind).reshape(len(blocks), -1).max(axis=1))
            lows = np.abs(quants.dequantize(blocks, kind).reshape(len(blocks), -1).min(axis=1))
            good = np.concatenate([good, blocks[(values < 100) & (lows < 100)]])
    return good[:count].reshape(shape[0], -1)


def metadata_config(path: Path, add: Any, architecture: str = "llama") -> ModelConfig:
    """The configuration of a file without weights, after ``add`` wrote its own keys."""
    out = writer(path, architecture, transformers.LlamaConfig(**SIZES))
    out.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    add(out)
    finish(out)
    return ModelConfig.from_folder(path)


def test_metadata(tmp_path: Path) -> None:
    def add(out: GGUFWriter) -> None:
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_eot_token_id(7)
        out.add_sliding_window(16)
        out.add_rope_dimension_count(4)

    config = metadata_config(tmp_path / "m.gguf", add)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert config.sliding_windows == (16, 16)
    assert (config.head_dim, config.rope.rotary_dim) == (8, 4)
    assert config.rms_norm_eps == 1e-6
    assert config.tie_word_embeddings
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (RopeScalingType.LINEAR, ("linear", 4.0, 128)),
        (RopeScalingType.YARN, ("yarn", 4.0, 32)),
        (RopeScalingType.NONE, ("default", 1.0, 128)),
    ],
)
def test_rope_scaling(tmp_path: Path, kind: RopeScalingType, expected: tuple[Any, ...]) -> None:
    def add(out: GGUFWriter) -> None:
        out.add_rope_scaling_type(kind)
        out.add_rope_scaling_factor(4.0)
        out.add_rope_scaling_orig_ctx_len(32)

    rope = metadata_config(tmp_path / "m.gguf", add).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == expected


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    reference = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            **SIZES,
            "hidden_size": 256,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        }
    )  # fmt: skip
    plain = 1.0 / 500000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / inverse_frequencies(reference.rope).numpy()).astype(np.float32)

    def write(path: Path, factors: np.ndarray[Any, Any]) -> Path:
        sizes = {**SIZES, "hidden_size": 256, "rope_parameters": {"rope_theta": 500000.0}}
        out = writer(path, "llama", transformers.LlamaConfig(**sizes))
        out.add_tensor("token_embd.weight", np.zeros((64, 256), np.float32))
        out.add_tensor("rope_freqs.weight", factors)
        finish(out)
        return path

    assert ModelConfig.from_folder(write(tmp_path / "a.gguf", factors)).rope == reference.rope
    factors[20] *= 1.5
    with pytest.raises(GgufError, match=r"rope_freqs\.weight is not a Llama 3\.1 scaling"):
        ModelConfig.from_folder(write(tmp_path / "b.gguf", factors))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda out: out.add_expert_count(4), "llama.expert_count"),
        (lambda out: out.add_value_length(16), "value_length"),
        (lambda out: out.add_rope_scaling_type(RopeScalingType.LONGROPE), "'longrope'"),
        (lambda out: out.add_uint32("llama.attention.head_count_kv", 0), "head_count_kv"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, add: Any, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        metadata_config(tmp_path / "m.gguf", add)


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"'gemma2' is not supported; supported are llama"):
        metadata_config(tmp_path / "m.gguf", lambda out: None, "gemma2")


def test_unknown_tensors_are_left_over(tmp_path: Path) -> None:
    model = random_model(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    out = writer(tmp_path / "m.gguf", "llama", model.config)
    for name, parameter in model.named_parameters():
        out.add_tensor(gguf_name(name), parameter.detach().numpy())
    out.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))
    finish(out)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_sinks\.weight is in the checkpoint"):
        load(tmp_path)


def test_a_file_cut_anywhere_gives_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(
        path, "llama", random_model(transformers.LlamaConfig, transformers.LlamaForCausalLM)
    )
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    # Densely through the header, sparsely through the tensors, and the last byte.
    for length in [*range(0, 4000, 7), *range(4000, len(whole), 5000), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            config_dict(GgufFile(cut))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(20), "is not a GGUF file"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "goes on beyond the end"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "goes on beyond the end"),
        (
            # An array of 2**60 bytes under the key "k".
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**60),
            "goes on beyond the end",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1),
            "elements of the unsupported type 9",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(8), "not UTF-8"),
    ],
)
def test_hostile_headers(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(GgufError, match=message):
        GgufFile(tmp_path / "bad.gguf")
