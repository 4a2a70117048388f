"""Loading a model's weights, tensor by tensor, straight into the form the decoder multiplies with.

Owns checkpoints (safetensors folders and GGUF files) and the fusing of projections. It never runs
code from a checkpoint: pickle files are refused. Invariant: every tensor the model needs was found
once with exactly the shape its configuration implies, nothing in the checkpoint was left over, and
no second copy of the weights is kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

import trident_kernels as ops
from trident_llm.model.config import ModelConfig, ModelConfigError, expected_tensors
from trident_llm.model.gguf import GgufCheckpoint, GgufFile, find_gguf

_PREFIX = "model."
_EMBEDDING, _HEAD = _PREFIX + "embed_tokens.weight", "lm_head.weight"
_INDEX_NAME = "model.safetensors.index.json"
# Buffers that old versions of transformers saved; they are recomputed from the configuration.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

_log = logging.getLogger(__name__)


class ModelLoadError(ModelConfigError):
    """The checkpoint does not hold the model its configuration describes; the text names the tensor."""


class Checkpoint(Protocol):
    """Tensors by Hugging Face name; shapes are known without reading, values are read one by one."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in the dtype of the file."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; H query heads and K key/value heads of size D, intermediate size I."""

    input_norm: torch.Tensor  # [hidden]
    qkv: ops.LinearWeight  # [(H + 2K) * D, hidden]: q, k, v
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    output: ops.LinearWeight  # [hidden, H * D]
    post_attention_norm: torch.Tensor  # [hidden]
    gate_up: ops.LinearWeight  # [2I, hidden]: gate, up
    down: ops.LinearWeight  # [hidden, I]


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder, on its device."""

    embedding: torch.Tensor  # [vocab_size, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: ops.LinearWeight | None  # [vocab_size, hidden]; None: it is not wanted


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    int8: bool = False,
    has_head: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> DecoderWeights:
    """Loads the model at ``path``: a Hugging Face folder or a ``.gguf`` file.

    ``int8`` quantizes the linear layers, the head included, but not the embedding. Without
    ``has_head`` the head is not read, and the checkpoint may be one that was saved without it.
    ``progress`` is told (tensors read, tensors in all). Peak memory is the packed model and the
    tensors of one fused projection. Raises :class:`ModelLoadError`.
    """
    with ExitStack() as files:
        checkpoint = open_checkpoint(path, files)
        if not has_head:
            checkpoint = _Headless(checkpoint)
        names = _check_tensors(checkpoint.shapes, config, has_head)
        reader = WeightReader(checkpoint, len(names), dtype, device, int8, progress)
        return _Assembler(reader, names, config).assemble(has_head)


class SafetensorsCheckpoint:
    """``model.safetensors``, or the shards named by ``model.safetensors.index.json``."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        """Opens all shards; they are closed with ``files``."""
        single = folder / "model.safetensors"
        index = None if single.is_file() else _read_index(folder / _INDEX_NAME)
        shards = [single.name] if index is None else sorted(set(index.values()))
        self._shard_of: dict[str, Any] = {}
        for shard in shards:
            opened = files.enter_context(_open_shard(folder / shard))
            found = set(opened.keys())
            if index is not None:
                _check_shard(shard, found, {n for n, where in index.items() if where == shard})
            self._shard_of.update(dict.fromkeys(found, opened))
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(shard.get_slice(name).get_shape()) for name, shard in self._shard_of.items()
        }

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._shard_of[name].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelLoadError(
                f"tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}; only "
                "float32, bfloat16 and float16 checkpoints are supported"
            )
        return tensor


class _Headless:
    """A :class:`Checkpoint` less its head; models saved without one have names without a prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._prefix = "" if _EMBEDDING in checkpoint.shapes else _PREFIX
        self.shapes: Mapping[str, tuple[int, ...]] = {
            self._prefix + name: shape for name, shape in checkpoint.shapes.items() if name != _HEAD
        }

    def read(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name.removeprefix(self._prefix))


class _GgufTensors:
    """A GGUF file as a :class:`Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self._checkpoint = GgufCheckpoint(GgufFile(path))
        self.shapes = self._checkpoint.shapes

    def read(self, name: str) -> torch.Tensor:
        # A copy, since plain float32 tensors are views of the read-only file.
        return torch.from_numpy(self._checkpoint.read(name).copy())


def open_checkpoint(path: Path, files: ExitStack) -> Checkpoint:
    """The checkpoint at ``path``, closed with ``files``. Raises :class:`ModelLoadError`."""
    if (path / "model.safetensors").is_file() or (path / _INDEX_NAME).is_file():
        return SafetensorsCheckpoint(path, files)
    gguf_path = find_gguf(path)
    if gguf_path is not None:
        return _GgufTensors(gguf_path)
    if path.is_dir():
        if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pt")):
            raise ModelLoadError(
                f"{path}: holds its weights as pickle files, which can run code when loaded and are "
                "not read; convert them to safetensors with transformers' "
                "save_pretrained(safe_serialization=True)"
            )
        if len(list(path.glob("*.gguf"))) > 1:
            raise ModelLoadError(f"{path}: holds several .gguf files; give the path of one")
    raise ModelLoadError(f"{path}: no model.safetensors, {_INDEX_NAME} or .gguf file there")


def _open_shard(path: Path) -> Any:
    if not path.is_file():
        raise ModelLoadError(f"{path}: is named by {_INDEX_NAME} but is not there")
    with path.open("rb") as file:
        if file.read(20).startswith(b"version https://git"):
            raise ModelLoadError(
                f"{path}: is a Git LFS pointer, not the weights; run git lfs pull in its repository"
            )
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path}: is not a complete safetensors file ({path.stat().st_size} bytes): {error}"
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path}: is not a safetensors index ({error!r})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: weight_map must name the file of each tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"{path}: tensor {name} must be in a file of the same folder")
    return weight_map


def _check_shard(shard: str, found: set[str], indexed: set[str]) -> None:
    if missing := sorted(indexed - found):
        raise ModelLoadError(
            f"{shard}: tensor {missing[0]} is in {_INDEX_NAME} but not in the file"
        )
    if extra := sorted(found - indexed):
        raise ModelLoadError(f"{shard}: tensor {extra[0]} is in the file but not in {_INDEX_NAME}")


def _check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, has_head: bool
) -> list[str]:
    """Compares the checkpoint with the configuration; returns the names to read.

    A model with tied embeddings may hold the embedding, the head, or both.
    """
    expected = expected_tensors(config)
    if not has_head:
        expected.pop(_HEAD, None)
    elif config.tie_word_embeddings and _HEAD in shapes:
        expected[_HEAD] = expected[_EMBEDDING]
        if _EMBEDDING not in shapes:
            del expected[_EMBEDDING]
    left_over = [n for n in shapes if not n.endswith(_IGNORED_SUFFIX)]
    check_shapes(expected, {n: shapes[n] for n in left_over}, config.architecture)
    return list(expected)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    architecture: str,
) -> None:
    """Raises :class:`ModelLoadError` unless a checkpoint holds just the expected tensors."""
    if missing := [name for name in expected if name not in found]:
        raise ModelLoadError(f"tensor {_some(missing)} missing from the checkpoint")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {list(found[name])}, but the configuration implies "
                f"{list(shape)}"
            )
    if left_over := sorted(name for name in found if name not in expected):
        raise ModelLoadError(
            f"tensor {_some(left_over)} in the checkpoint, but not part of a "
            f"{architecture} with this configuration"
        )


def _some(names: list[str]) -> str:
    verb = "is" if len(names) == 1 else f"(and {len(names) - 1} more) are"
    return f"{names[0]} {verb}"


class WeightReader:
    """Reads a checkpoint's tensors in order and packs them at once.

    Args:
        num_tensors: tensors that will be read in all.
        progress: told (tensors read, tensors in all).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        num_tensors: int,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._checkpoint, self._num_tensors = checkpoint, num_tensors
        self._dtype, self._device, self.int8 = dtype, device, int8
        self._progress, self._read_count = progress, 0

    def linear(self, names: list[str], has_bias: bool) -> ops.LinearWeight:
        """Several projections of the same input as one."""
        weight = self.tensor(*(name + ".weight" for name in names))
        bias = self.tensor(*(name + ".bias" for name in names)) if has_bias else None
        return ops.pack_linear(weight, bias, int8=self.int8)

    def tensor(self, *names: str) -> torch.Tensor:
        """The tensors under each other, in the wanted dtype, in memory of our own."""
        shapes = [self._checkpoint.shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes):
            out[start : start + shape[0]].copy_(self._checkpoint.read(name))
            start += shape[0]
            self._read_count += 1
            if self._progress is not None:
                self._progress(self._read_count, self._num_tensors)
        return out


class _Assembler:
    """Reads a decoder's tensors in order."""

    def __init__(self, reader: WeightReader, names: list[str], config: ModelConfig) -> None:
        self._config, self._names, self._int8 = config, names, reader.int8
        self._tensor, self._linear = reader.tensor, reader.linear

    def assemble(self, with_head: bool) -> DecoderWeights:
        has_embedding, has_head = _EMBEDDING in self._names, _HEAD in self._names
        embedding = self._tensor(_EMBEDDING if has_embedding else _HEAD)
        layers = tuple(self._layer(index) for index in range(self._config.num_layers))
        final_norm = self._tensor("model.norm.weight")
        if not with_head:
            return DecoderWeights(embedding, layers, final_norm, None)
        head = self._tensor(_HEAD) if has_embedding and has_head else embedding
        if self._config.tie_word_embeddings and head is not embedding:
            if torch.equal(head, embedding):
                head = embedding
            else:  # as transformers does
                _log.warning(
                    "tie_word_embeddings is true, but %s differs from %s in the checkpoint: the "
                    "head is not tied", _HEAD, _EMBEDDING,
                )  # fmt: skip
        packed = ops.pack_linear(head, None, int8=self._int8)
        return DecoderWeights(embedding, layers, final_norm, packed)

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        attention = prefix + "self_attn."
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight"),
            qkv=self._linear(
                [attention + name for name in ("q_proj", "k_proj", "v_proj")],
                config.attention_bias,
            ),
            q_norm=self._tensor(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=self._tensor(attention + "k_norm.weight") if config.qk_norm else None,
            output=self._linear([attention + "o_proj"], config.attention_output_bias),
            post_attention_norm=self._tensor(prefix + "post_attention_layernorm.weight"),
            gate_up=self._linear(
                [prefix + "mlp.gate_proj", prefix + "mlp.up_proj"], config.mlp_bias
            ),
            down=self._linear([prefix + "mlp.down_proj"], config.mlp_bias),
        )
