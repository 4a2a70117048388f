"""What a model folder says about a text encoder of the BERT family.

It imports no torch. Invariant: an :class:`EncoderConfig` that exists describes a model the encoder
computes exactly; whatever it could not honour was refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trident_llm.model.config import ModelConfigError, read_dtype, read_json
from trident_llm.model.config_fields import Fields

# By model_type. RoBERTa's positions begin behind the id of its padding token, which holds one itself.
ENCODER_TYPES = ("bert", "roberta", "xlm-roberta")
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
_ROBERTA_DEFAULTS = {**_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}


@dataclass(frozen=True)
class EncoderConfig:
    """One encoder: absolute positions, layer norm behind each half of a layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    activation: str  # one of ACTIVATIONS
    num_positions: int  # rows of the table of positions
    position_offset: int  # the row of a text's first token
    type_vocab_size: int
    dtype: str | None  # float32, bfloat16, float16; None: the folder does not say

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EncoderConfig:
        """Reads the content of config.json; raises :class:`ModelConfigError` naming the key."""
        model_type = config.get("model_type")
        if model_type not in ENCODER_TYPES:
            raise ModelConfigError(
                f"model_type: {model_type!r} is not supported; supported encoders are "
                f"{', '.join(ENCODER_TYPES)}"
            )
        is_bert = model_type == "bert"
        fields = Fields(config, _DEFAULTS if is_bert else _ROBERTA_DEFAULTS)
        activation = fields.raw("hidden_act")
        if activation not in ACTIVATIONS:
            raise ModelConfigError(
                f"hidden_act: {activation!r} is not supported; supported are "
                f"{', '.join(ACTIVATIONS)}"
            )
        if (kind := fields.raw("position_embedding_type", "absolute")) != "absolute":
            raise ModelConfigError(
                f"position_embedding_type: {kind!r} is not supported; supported is 'absolute'"
            )
        for name in ("is_decoder", "add_cross_attention"):
            if fields.boolean(name):
                raise ModelConfigError(f"{name}: true is not supported; supported is false")
        hidden_size, num_heads = (
            fields.integer("hidden_size"),
            fields.integer("num_attention_heads"),
        )
        if hidden_size % num_heads:
            raise ModelConfigError(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})"
            )
        padding = fields.optional_integer("pad_token_id", minimum=0) or 0
        made = cls(
            model_type=model_type,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            activation=activation,
            num_positions=fields.integer("max_position_embeddings"),
            position_offset=0 if is_bert else padding + 1,
            type_vocab_size=fields.integer("type_vocab_size"),
            dtype=read_dtype(config),
        )
        if made.max_supported_len < 1:
            raise ModelConfigError("max_position_embeddings: leaves no position for a token")
        return made

    @property
    def max_supported_len(self) -> int:
        """Longest text, in tokens, those that the tokenizer adds included."""
        return self.num_positions - self.position_offset


def is_encoder(folder: Path) -> bool:
    """Whether the folder's config.json names an encoder that is supported here."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") in ENCODER_TYPES


def expected_encoder_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the encoder reads, as Hugging Face names them."""
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }

    def add(name: str, *shape: int) -> None:
        shapes[name + ".weight"], shapes[name + ".bias"] = shape, shape[:1]

    add("embeddings.LayerNorm", hidden)
    for index in range(config.num_layers):
        prefix = f"encoder.layer.{index}."
        for name in ("query", "key", "value"):
            add(f"{prefix}attention.self.{name}", hidden, hidden)
        add(prefix + "attention.output.dense", hidden, hidden)
        add(prefix + "attention.output.LayerNorm", hidden)
        add(prefix + "intermediate.dense", inter, hidden)
        add(prefix + "output.dense", hidden, inter)
        add(prefix + "output.LayerNorm", hidden)
    return shapes
