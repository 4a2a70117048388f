"""Reading GGUF files: metadata, configuration and tensors in Hugging Face's names and layout.

Owns the container format (bounds-checked, so that a damaged file gives one clear error) and the
translation of llama.cpp's conventions. Block formats are dequantized by the ``gguf`` package. It
imports no torch and knows nothing of the decoder. Invariant: what it hands out is what the original
Hugging Face checkpoint would hold, up to the file's own quantization.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from trident_llm.model.config import ModelConfigError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# llama.cpp stores the rotated dimensions of these architectures in interleaved order.
_PERMUTED_ARCHITECTURES = ("llama", "mistral")

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # read as configuration, not as a weight

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class GgufError(ModelConfigError):
    """The file is not a GGUF file this engine can read; the text says what is wrong with it."""


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]  # row-major, as torch and numpy count
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GgufFile:
    """An opened GGUF file: ``metadata`` by key, ``tensors`` by llama.cpp name.

    Raises :class:`GgufError` when the file is not GGUF version 2 or 3, little-endian, or is cut
    short, or any of its tables points outside of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise GgufError(f"{path}: cannot be read ({error})") from error
        parser = _Parser(path, self._data)
        self.metadata, self.tensors = parser.parse()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; keys beginning with a dot are of the file's own architecture."""
        return self.metadata.get(self.architecture + key if key[0] == "." else key, default)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantized to float32, in the file's own layout."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, count=tensor.size, offset=tensor.offset)
        try:
            values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise GgufError(
                f"{self.path}: tensor {name} has type {tensor.kind.name}, which cannot be "
                "dequantized; use a file with a more common quantization such as Q8_0 or Q4_K"
            ) from error
        return values.astype(np.float32, copy=False).reshape(tensor.shape)


class GgufCheckpoint:
    """The tensors of a GGUF file under Hugging Face names, in Hugging Face's row order."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._names = {_hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            hf: file.tensors[name].shape for hf, name in self._names.items()
        }
        self._heads = {
            "q_proj": int(file.get(".attention.head_count", 0)),
            "k_proj": _kv_heads(file),
        }

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor in float32; ``name`` is one of ``shapes``."""
        values = self._file.read(self._names[name])
        projection = name.split(".")[-2]
        if self._file.architecture in _PERMUTED_ARCHITECTURES and projection in self._heads:
            return _restore_rotary_order(values, self._heads[projection])
        return values


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` means: itself, or the only one in the folder; else None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def config_dict(file: GgufFile) -> dict[str, Any]:
    """The content of the config.json that the original model's folder would hold."""
    architecture = _ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise GgufError(
            f"general.architecture: {file.architecture!r} is not supported; supported are "
            + ", ".join(_ARCHITECTURES)
        )
    if file.get(".expert_count", 0):
        raise GgufError(f"{file.architecture}.expert_count: expert models are not supported")
    if "token_embd.weight" not in file.tensors:
        raise GgufError(f"{file.path}: tensor token_embd.weight is missing")
    heads = _required(file, ".attention.head_count")
    hidden = _required(file, ".embedding_length")
    head_dim = int(file.get(".attention.key_length", hidden // heads if heads else 0))
    if file.get(".attention.value_length", head_dim) != head_dim:
        raise GgufError("attention.value_length: must equal attention.key_length")
    window = file.get(".attention.sliding_window")
    if window is not None and file.architecture == "llama":
        architecture = "MistralForCausalLM"  # the same layers, with a window in each
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": _required(file, ".feed_forward_length"),
        "num_hidden_layers": _required(file, ".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _required(file, ".context_length"),
        "rms_norm_eps": _decimal(file.get(".attention.layer_norm_rms_epsilon", 1e-6)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _dtype(file),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        **_biases(file, architecture),
        **_rope(file, head_dim),
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = window
    elif window is not None:
        config.update(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    return config


def generation_config_dict(file: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: the special ids, end-of-turn ids included."""
    ends = [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end_ids = list(dict.fromkeys(end for end in ends if end is not None))
    named = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids[0] if len(end_ids) == 1 else end_ids or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in named.items() if value is not None}


def _hf_name(name: str) -> str:
    """Hugging Face's name; an unknown one is kept, so that the loader can report it."""
    if name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, suffix = rest.rpartition(".")
    if name.startswith("blk.") and block.isdigit() and part in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[part]}.{suffix}"
    return name


def _restore_rotary_order(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k from llama.cpp's pairs (0, 1), (2, 3), ... to the halves Hugging Face rotates.

    Within each head row 2i came from row i, and row 2i + 1 from row i + head_dim / 2.
    """
    rows = values.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise GgufError(f"attention.head_count: {heads} heads do not divide {rows} rows")
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    restored: npt.NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(values.shape)
    return restored


def _required(file: GgufFile, key: str) -> int:
    value = file.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GgufError(
            f"{file.path}: {file.architecture}{key} must be a positive integer, got {value!r}"
        )
    return value


def _kv_heads(file: GgufFile) -> int:
    if file.get(".attention.head_count_kv") is None:
        return _required(file, ".attention.head_count")
    return _required(file, ".attention.head_count_kv")


def _decimal(value: float) -> float:
    """A float32 from the file as the shortest decimal that means it (1e-05, not 9.9999997e-06)."""
    return float(str(np.float32(value)))


def _dtype(file: GgufFile) -> str:
    """The dtype that holds the file's matrices best: its own if they are plain floats."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds == {GGMLQuantizationType.F16} else "bfloat16"


def _biases(file: GgufFile, architecture: str) -> dict[str, bool]:
    """Biases are not in the metadata: a model has those whose tensors are there."""
    if architecture not in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        return {}
    biases = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if architecture == "LlamaForCausalLM":
        biases["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return biases


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": _decimal(file.get(".rope.freq_base", 10000.0))}
    rotated = file.get(".rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    kind = file.get(".rope.scaling.type", "none")
    factor = file.get(".rope.scaling.factor")
    if kind == "none" and file.get(".rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", file.get(".rope.scale_linear")
    if _ROPE_FACTORS in file.tensors:
        rope["rope_scaling"] = _llama3_scaling(file, rope["rope_theta"], rotated)
    elif kind == "linear":
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        for key, neutral in (
            (".rope.scaling.yarn_log_multiplier", 0.0),
            (".rope.scaling.attn_factor", 1.0),
        ):
            if file.get(key, neutral) != neutral:
                raise GgufError(f"{file.architecture}{key}: not supported")
        rope["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": file.get(".rope.scaling.original_context_length"),
        }
    elif kind != "none":
        raise GgufError(f"rope.scaling.type: {kind!r} is not supported")
    return rope


def _llama3_scaling(file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which the file holds only as a tensor of its effects.

    The factors are recomputed from the parameters of all published models and must agree.
    """
    factors = file.read(_ROPE_FACTORS).ravel()
    factor = float(factors.max())
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise GgufError(f"{file.path}: {_ROPE_FACTORS} is not a Llama 3.1 scaling: not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


class _Parser:
    """One pass over the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != b"GGUF":
            raise GgufError(f"{self._path}: is not a GGUF file (it does not begin with GGUF)")
        version = self._scalar("I")
        if version not in (2, 3):
            raise GgufError(
                f"{self._path}: GGUF version {version} is not supported (2 and 3, little-endian, "
                "are); convert the model again with a current llama.cpp"
            )
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in entries:
                raise self._damaged(f"tensor {name} occurs twice")
            entries[name] = (self._shape(name), self._scalar("I"), self._scalar("Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return metadata, {
            name: self._tensor(name, shape, kind, start + offset)
            for name, (shape, kind, offset) in entries.items()
        }

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError) as error:
            raise GgufError(f"{self._path}: tensor {name} has the unknown type {kind}") from error
        if shape[-1] % block:
            raise self._damaged(f"tensor {name} has rows of {shape[-1]} values")
        size = block_bytes * (shape[-1] // block)
        for dim in shape[:-1]:
            size *= dim
        if offset + size > len(self._data):
            raise self._damaged(f"tensor {name} ends beyond the end of the file")
        return GgufTensor(shape, quantization, offset, size)

    def _shape(self, name: str) -> tuple[int, ...]:
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= 4:
            raise self._damaged(f"tensor {name} has {num_dims} dimensions")
        return tuple(self._scalar("Q") for _ in range(num_dims))[::-1]

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"a metadata value has the unknown type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[element])
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self._take(count * width)))
        if element == _STRING:
            return [self._string() for _ in range(count)]
        raise self._damaged(f"a metadata array has elements of the unsupported type {element}")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged("a metadata text is not UTF-8") from error

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._damaged("its header goes on beyond the end of the file")
        raw = self._data[self._at : end]
        self._at = end
        return raw

    def _damaged(self, reason: str) -> GgufError:
        size = os.path.getsize(self._path)
        return GgufError(
            f"{self._path}: is damaged or not completely downloaded ({size} bytes): {reason}"
        )
