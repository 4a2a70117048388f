"""Loading checkpoints: tied and untied heads, and every way a checkpoint can be wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import trident_kernels as ops
from tests.model.paged import PagedRun, Sequence
from trident_llm.model.config import ModelConfig, expected_tensors
from trident_llm.model.decoder import Decoder
from trident_llm.model.loader import ModelLoadError, load_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
Tensors = dict[str, torch.Tensor]


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            **keys,
        }
    )


def random_tensors(model: ModelConfig) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_tensors(model).items()
    }


def load(path: Path, model: ModelConfig, **keys: Any) -> Decoder:
    device = torch.device("cpu")
    return Decoder.load(path, model, dtype=torch.float32, device=device, max_len=32, **keys)


def logits(path: Path, model: ModelConfig) -> torch.Tensor:
    return PagedRun(load(path, model)).step([Sequence([1, 2, 3])])


def write_shards(folder: Path, tensors: Tensors) -> dict[str, Any]:
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in halves.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    index = {"weight_map": {name: s for s, members in halves.items() for name in members}}
    write_index(folder, index)
    return index


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("held", ["both equal", "both", "embedding", "head"])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool, held: str) -> None:
    untied = config()
    tensors = random_tensors(untied)
    if held != "both":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    expected = logits(tmp_path, untied)  # what the model with these two matrices says
    if held in ("embedding", "head"):
        del tensors[HEAD if held == "embedding" else EMBEDDING]
    save_file(tensors, tmp_path / "model.safetensors")
    if not tied and held in ("embedding", "head"):
        missing = HEAD if held == "embedding" else EMBEDDING
        with pytest.raises(ModelLoadError, match=f"{missing} is missing"):
            load(tmp_path, untied)
        return
    torch.testing.assert_close(logits(tmp_path, config(tie_word_embeddings=tied)), expected)


def test_a_tied_head_shares_the_memory_of_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = config(tie_word_embeddings=True)
    tensors = random_tensors(model)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, tmp_path / "model.safetensors")
    packed: list[torch.Tensor] = []
    pack = ops.pack_linear

    def spy(weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Any:
        packed.append(weight)
        return pack(weight, bias, **options)

    monkeypatch.setattr(ops, "pack_linear", spy)
    weights = load_weights(
        tmp_path, model, dtype=torch.bfloat16, device=torch.device("cpu"), progress=None
    )
    assert packed[-1] is weights.embedding
    # q, k and v are one matrix, gate and up another.
    assert [tuple(weight.shape) for weight in packed[:4]] == [
        (32, 16),
        (16, 16),
        (48, 16),
        (16, 24),
    ]
    assert all(weight.dtype == torch.bfloat16 for weight in packed)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    model = config(attention_bias=True)
    save_file(random_tensors(model), tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    load(tmp_path, model, progress=lambda done, total: seen.append((done, total)))
    total = len(expected_tensors(model))
    assert seen == [(count, total) for count in range(1, total + 1)]


def test_saved_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path, config())


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = random_tensors(config())
    save_file({name: t for name, t in tensors.items() if name != K_PROJ}, path)
    with pytest.raises(ModelLoadError, match=f"{K_PROJ} is missing"):
        load(tmp_path, config())
    save_file({**tensors, "model.layers.2.odd.weight": torch.ones(1)}, path)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.odd\.weight is in the checkpoint"):
        load(tmp_path, config())
    save_file({**tensors, K_PROJ: torch.ones(16, 8)}, path)
    with pytest.raises(ModelLoadError, match=rf"{K_PROJ} has shape \[16, 8\].*\[8, 16\]"):
        load(tmp_path, config())
    save_file({**tensors, K_PROJ: torch.ones(8, 16, dtype=torch.int8)}, path)
    with pytest.raises(ModelLoadError, match=f"{K_PROJ} is stored as int8"):
        load(tmp_path, config())


def test_biases_the_configuration_does_not_mention_are_left_over(tmp_path: Path) -> None:
    save_file(random_tensors(config(attention_bias=True)), tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"k_proj\.bias \(and 7 more\) are in the checkpoint"):
        load(tmp_path, config())


def test_shards_are_checked_against_the_index(tmp_path: Path) -> None:
    tensors = random_tensors(config())
    index = write_shards(tmp_path, tensors)
    load(tmp_path, config())
    weight_map: dict[str, str] = index["weight_map"]
    shard = weight_map[K_PROJ]
    write_index(tmp_path, {"weight_map": {n: s for n, s in weight_map.items() if n != K_PROJ}})
    with pytest.raises(ModelLoadError, match=f"{K_PROJ} is in the file but not in"):
        load(tmp_path, config())
    write_index(tmp_path, {"weight_map": {**weight_map, "ghost": shard}})
    with pytest.raises(ModelLoadError, match=rf"{shard}: tensor ghost is in .* not in the file"):
        load(tmp_path, config())
    write_index(tmp_path, {"weight_map": {**weight_map, "ghost": "c.safetensors"}})
    with pytest.raises(ModelLoadError, match=r"c\.safetensors: is named by"):
        load(tmp_path, config())


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "not a safetensors index"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": {"x": "../x.safetensors"}}, "tensor x must be in a file of the same"),
    ],
)
def test_broken_index(tmp_path: Path, index: Any, message: str) -> None:
    write_index(tmp_path, index)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, config())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a complete safetensors file"),
        (b"\xff" * 64, "not a complete safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ],
)
def test_broken_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, config())


def test_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(config()), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"not a complete safetensors file \(\d+ bytes\)"):
        load(tmp_path, config())


def test_pickle_is_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ModelLoadError, match="convert them to safetensors"):
        load(tmp_path, config())
    assert not (tmp_path / "ran").exists()


def test_empty_and_ambiguous_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        load(tmp_path, config())
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"several \.gguf files"):
        load(tmp_path, config())
