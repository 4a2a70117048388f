"""The forward pass of the BERT family: texts are read in both directions and nothing is generated.

A batch is flat, without padding: linear layers and norms see the tokens of all texts at once, and
attention runs once for all texts of one length. Invariant: hidden states equal those of the dense
Hugging Face forward pass of each text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F

import trident_kernels as ops
from trident_llm.model.encoder_config import EncoderConfig, expected_encoder_tensors
from trident_llm.model.loader import WeightReader, check_shapes, open_checkpoint

# Of a checkpoint's tensors: heads that embeddings do not use, and a buffer of old versions.
_UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class _Norm:
    weight: torch.Tensor  # [hidden]
    bias: torch.Tensor  # [hidden]


@dataclass(frozen=True)
class _Layer:
    qkv: ops.LinearWeight  # [3 * hidden, hidden]: query, key, value
    output: ops.LinearWeight  # [hidden, hidden]
    attention_norm: _Norm
    up: ops.LinearWeight  # [intermediate, hidden]
    down: ops.LinearWeight  # [hidden, intermediate]
    output_norm: _Norm


@dataclass(frozen=True)
class EncoderWeights:
    """All weights of an encoder, on its device."""

    words: torch.Tensor  # [vocab_size, hidden]
    positions: torch.Tensor  # [max_supported_len, hidden], with the one token type that is used
    norm: _Norm
    layers: tuple[_Layer, ...]


class Encoder:
    """A loaded model. :meth:`hidden` runs a flat batch of whole texts."""

    def __init__(self, config: EncoderConfig, weights: EncoderWeights) -> None:
        self.config = config
        self._weights = weights
        self._activation = _ACTIVATIONS[config.activation]

    @classmethod
    def load(
        cls,
        folder: Path,
        config: EncoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
    ) -> Encoder:
        """Loads a Hugging Face folder; ``progress`` is told (tensors read, tensors in all).

        Raises ModelLoadError, naming the tensor or file at fault.
        """
        with ExitStack() as files:
            checkpoint = open_checkpoint(folder, files)
            # A model that was saved with a head has its encoder's tensors under the model's name.
            prefix = config.model_type.replace("xlm-", "") + "."
            if not any(name.startswith(prefix) for name in checkpoint.shapes):
                prefix = ""
            expected = {prefix + k: v for k, v in expected_encoder_tensors(config).items()}
            found = {
                name: shape
                for name, shape in checkpoint.shapes.items()
                if not name.removeprefix(prefix).startswith(_UNUSED)
            }
            check_shapes(expected, found, config.model_type)
            reader = WeightReader(checkpoint, len(expected), dtype, device, progress=progress)
            return cls(config, _assemble(reader, config, prefix))

    @property
    def device(self) -> torch.device:
        return self._weights.words.device

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @torch.inference_mode()
    def hidden(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Final hidden states, [T, hidden_size], of texts that are sorted by their length.

        ``texts`` are token ids; their rows lie one text after another.
        """
        weights, eps = self._weights, self.config.layer_norm_eps
        shape = (self.config.hidden_size,)

        def norm(x: torch.Tensor, by: _Norm) -> torch.Tensor:
            return F.layer_norm(x, shape, by.weight, by.bias, eps)

        flat = [token_id for text in texts for token_id in text]
        places = [place for text in texts for place in range(len(text))]
        indices = torch.tensor([flat, places]).to(self.device)
        x = F.embedding(indices[0], weights.words) + F.embedding(indices[1], weights.positions)
        x = norm(x, weights.norm)
        groups = [(length, len(list(same))) for length, same in groupby(texts, len)]
        for layer in weights.layers:
            attended = self._attend(ops.linear(x, layer.qkv), groups)
            x = norm(ops.linear(attended, layer.output) + x, layer.attention_norm)
            inner = self._activation(ops.linear(x, layer.up))
            x = norm(ops.linear(inner, layer.down) + x, layer.output_norm)
        return x

    def _attend(self, qkv: torch.Tensor, groups: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Attention within each text, [T, 3 * hidden] to [T, hidden].

        ``groups``: (length, how many texts) of the texts of one length, in the order of their rows.
        """
        heads = self.config.num_heads
        out = qkv.new_empty((len(qkv), qkv.shape[1] // 3))
        start = 0
        for length, count in groups:
            rows = slice(start, start + length * count)
            start = rows.stop
            query, key, value = (
                qkv[rows].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            )
            attended = F.scaled_dot_product_attention(query, key, value)
            out[rows].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
        return out


def _assemble(reader: WeightReader, config: EncoderConfig, prefix: str) -> EncoderWeights:
    def norm(name: str) -> _Norm:
        return _Norm(reader.tensor(name + ".weight"), reader.tensor(name + ".bias"))

    def layer(index: int) -> _Layer:
        name = f"{prefix}encoder.layer.{index}."
        projections = [f"{name}attention.self.{part}" for part in ("query", "key", "value")]
        return _Layer(
            qkv=reader.linear(projections, True),
            output=reader.linear([name + "attention.output.dense"], True),
            attention_norm=norm(name + "attention.output.LayerNorm"),
            up=reader.linear([name + "intermediate.dense"], True),
            down=reader.linear([name + "output.dense"], True),
            output_norm=norm(name + "output.LayerNorm"),
        )

    embeddings = prefix + "embeddings."
    words = reader.tensor(embeddings + "word_embeddings.weight")
    positions = reader.tensor(embeddings + "position_embeddings.weight")
    types = reader.tensor(embeddings + "token_type_embeddings.weight")
    return EncoderWeights(
        words=words,
        positions=positions[config.position_offset :] + types[0],
        norm=norm(embeddings + "LayerNorm"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
    )
