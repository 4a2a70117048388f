"""What a model folder says about its model: sizes, RoPE, windows, special ids.

Owns the reading of ``config.json`` and ``generation_config.json`` of the Llama family. It imports no
torch, so that a command line can size a model before loading anything, and knows nothing of tensors
beyond their names and shapes. Invariant: a :class:`ModelConfig` that exists describes a model the
decoder computes exactly; whatever it could not honour was refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trident_llm.model.config_fields import Fields, to_integer
from trident_llm.model.config_fields import ModelConfigError as ModelConfigError
from trident_llm.model.rope_config import RopeConfig, read_rope

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# What generation_config.json may set as defaults of a request; a request's own values win.
_GENERATION_KEYS = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class _Architecture:
    """What Hugging Face fixes per architecture: defaults of absent keys, and what is configurable."""

    model_type: str
    defaults: Mapping[str, Any]
    biases: Literal["attention_bias", "always_qkv", "never"]
    mlp_bias: bool = False  # whether the key mlp_bias is read
    qk_norm: bool = False
    windows: Literal["none", "all_layers", "upper_layers"] = "none"


_QWEN_DEFAULTS = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(
        "llama",
        {
            "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
            "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
        },
        biases="attention_bias",
        mlp_bias=True,
    ),
    "MistralForCausalLM": _Architecture(
        "mistral",
        {
            "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "sliding_window": 4096,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        biases="never",
        windows="all_layers",
    ),
    "Qwen2ForCausalLM": _Architecture(
        "qwen2", _QWEN_DEFAULTS, biases="always_qkv", windows="upper_layers"
    ),
    "Qwen3ForCausalLM": _Architecture(
        "qwen3",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        biases="attention_bias",
        qk_norm=True,
        windows="upper_layers",
    ),
}  # fmt: skip
DECODER_TYPES = tuple(known.model_type for known in _ARCHITECTURES.values())


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Llama family, with every default resolved."""

    architecture: str
    vocab_size: int  # rows of the embedding and the head; a tokenizer may have fewer ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # of q, k and v
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer: keys a query sees, its own included
    dtype: str | None  # float32, bfloat16, float16; None: the folder does not say
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Reads a Hugging Face folder, a ``.gguf`` file, or a folder that holds only one.

        Raises :class:`ModelConfigError` naming the file and the key at fault.
        """
        if path.is_dir() and (path / "config.json").is_file():
            generation = path / "generation_config.json"
            return cls.from_dict(
                read_json(path / "config.json"),
                read_json(generation) if generation.is_file() else None,
            )
        # Imported here: reading GGUF needs numpy, and the command line mostly does not.
        from trident_llm.model import gguf

        file = gguf.find_gguf(path)
        if file is None:
            raise ModelConfigError(
                f"{path}: no config.json and no single .gguf file there; give a Hugging Face model "
                "folder or the path of a .gguf file"
            )
        opened = gguf.GgufFile(file)
        return cls.from_dict(gguf.config_dict(opened), gguf.generation_config_dict(opened))

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Reads the content of config.json and, if the folder has one, generation_config.json."""
        name, architecture = _architecture(config)
        fields = Fields(config, architecture.defaults)
        _refuse_unsupported(fields)
        num_heads = fields.integer("num_attention_heads", 32)
        num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})"
            )
        hidden_size = fields.integer("hidden_size", 4096)
        head_dim = fields.optional_integer("head_dim")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ModelConfigError(
                    f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
                    f"({num_heads}) when head_dim is not given"
                )
            head_dim = hidden_size // num_heads
        max_positions = fields.integer("max_position_embeddings")
        num_layers = fields.integer("num_hidden_layers", 32)
        config_bias = architecture.biases == "attention_bias" and fields.boolean("attention_bias")
        generation = generation_config or {}
        return cls(
            architecture=name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=read_rope(config, head_dim, max_positions),
            tie_word_embeddings=fields.boolean("tie_word_embeddings"),
            attention_bias=config_bias or architecture.biases == "always_qkv",
            attention_output_bias=config_bias,
            mlp_bias=architecture.mlp_bias and fields.boolean("mlp_bias"),
            qk_norm=architecture.qk_norm,
            sliding_windows=_sliding_windows(fields, architecture, num_layers),
            dtype=read_dtype(config),
            bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
            eos_token_ids=_eos_ids(fields, generation),
            generation_defaults={
                key: generation[key] for key in _GENERATION_KEYS if generation.get(key) is not None
            },
        )

    @property
    def max_supported_len(self) -> int:
        """Longest sequence the positions cover, RoPE scaling included, in tokens."""
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            return int(self.rope.original_max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether a token's rotation depends on how long its sequence is (dynamic NTK)."""
        return self.rope.rope_type == "dynamic"


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors a checkpoint of this model holds, in reading order.

    Names are Hugging Face's; linear weights are [out_features, in_features].
    """
    hidden, inter, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    linears = (
        ("self_attn.q_proj", q_size, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_size, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_size, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q_size, config.attention_output_bias),
        ("mlp.gate_proj", inter, hidden, config.mlp_bias),
        ("mlp.up_proj", inter, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inter, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        for name, out_features, in_features, bias in linears:
            shapes[prefix + name + ".weight"] = (out_features, in_features)
            if bias:
                shapes[prefix + name + ".bias"] = (out_features,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights held once in ``dtype`` (float32, bfloat16 or float16)."""
    return sum(math.prod(s) for s in expected_tensors(config).values()) * DTYPE_BYTES[dtype]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises :class:`ModelConfigError` naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: must hold a JSON object")
    return content


def _architecture(config: Mapping[str, Any]) -> tuple[str, _Architecture]:
    names = config.get("architectures") or [
        name
        for name, known in _ARCHITECTURES.items()
        if known.model_type == config.get("model_type")
    ]
    if isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES:
        return names[0], _ARCHITECTURES[names[0]]
    found = names or config.get("model_type")
    raise ModelConfigError(
        f"architectures: {found!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.values.get("quantization_config") is not None:
        raise ModelConfigError(
            "quantization_config: quantized checkpoints are not supported; use the model's "
            "float32, bfloat16 or float16 weights, or a .gguf file"
        )
    activation = fields.raw("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelConfigError(f"hidden_act: {activation!r} is not supported; supported is 'silu'")
    if fields.boolean("rope_interleaved"):
        raise ModelConfigError("rope_interleaved: true is not supported; supported is false")


def read_dtype(config: Mapping[str, Any]) -> str | None:
    """The type that config.json says the weights have; None if it does not say."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelConfigError(
            f"torch_dtype: {name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}"
        )
    return name


def _eos_ids(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that either file names: chat models list their end-of-turn ids in one of them only."""
    named = [generation.get("eos_token_id"), fields.values.get("eos_token_id")]
    if named == [None, None]:
        named = [fields.raw("eos_token_id")]
    ids = [id_ for value in named for id_ in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(to_integer("eos_token_id", i, 0) for i in ids if i is not None))


def _sliding_windows(
    fields: Fields, architecture: _Architecture, num_layers: int
) -> tuple[int | None, ...]:
    """The attention window of each layer, by the rules of Hugging Face's implementations."""
    layer_types = fields.values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise ModelConfigError(f"layer_types: must be a list of {num_layers} entries")
        for kind in layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelConfigError(
                    f"layer_types: {kind!r} is not supported; supported are 'full_attention' and "
                    "'sliding_attention'"
                )
    if architecture.windows == "none":
        if layer_types is not None and "sliding_attention" in layer_types:
            raise ModelConfigError(
                f"layer_types: 'sliding_attention' is not part of {architecture.model_type} models"
            )
        return (None,) * num_layers
    window = fields.optional_integer("sliding_window")
    if architecture.windows == "all_layers":
        uniform = "full_attention" if window is None else "sliding_attention"
        if layer_types is not None and any(kind != uniform for kind in layer_types):
            raise ModelConfigError(
                f"layer_types: {architecture.model_type} models use sliding_window ({window}) in "
                "every layer; layers that differ are not supported"
            )
        return (window,) * num_layers
    if window is None or not fields.boolean("use_sliding_window"):
        return (None,) * num_layers
    if layer_types is None:
        first = to_integer("max_window_layers", fields.raw("max_window_layers"), 0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
