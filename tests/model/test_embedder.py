"""Embedders: what sentence-transformers files say is followed, for encoders and for decoders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.model.test_encoder import save, texts_of
from trident_llm.core.embedding import parse_embedding_config
from trident_llm.core.errors import ConfigError
from trident_llm.model.config import ModelConfigError
from trident_llm.model.embedder import Embedder
from trident_llm.model.loader import ModelLoadError
from trident_llm.model.pooling_config import PoolingConfig

FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
MODULES = ["Transformer", "Pooling", "Normalize"]


def write_pooling(folder: Path, method: str = "mean", *, modules: list[str] = MODULES) -> None:
    """The files of sentence-transformers."""
    kinds = "sentence_transformers.models."
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": kinds + kind}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed[::-1]))
    flags = {f"pooling_mode_{name}": key == method for key, name in FLAGS.items()}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, **flags})


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def load(folder: Path, **settings: Any) -> Embedder:
    config, _ = parse_embedding_config({"model": str(folder), **settings})
    return Embedder.load(config, vocab_size=120)


def pooled(hidden: torch.Tensor, method: str) -> torch.Tensor:
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[method]


@pytest.mark.parametrize("method", list(FLAGS))
def test_encoders_are_pooled_as_their_files_say(tmp_path: Path, method: str) -> None:
    model = save(tmp_path)
    write_pooling(tmp_path, method)
    embedder = load(tmp_path)
    texts = texts_of([7, 1, 30, 7, 12])
    texts = [texts[i] for i in (3, 0, 4, 1, 2)]  # not in the order of their lengths
    vectors = embedder.embed(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, embedder.num_dimensions) == (5, 32)
    for text, vector in zip(texts, vectors):
        with torch.no_grad():
            hidden = model(torch.tensor([text])).last_hidden_state[0]
        np.testing.assert_allclose(vector, pooled(hidden, method), rtol=1e-4, atol=1e-4)


DECODER = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "initializer_range": 0.3, "dtype": "float32",
}  # fmt: skip


def save_decoder(folder: Path, kind: str, head: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**DECODER)
    model = getattr(transformers, kind + head)(config).eval()
    model.save_pretrained(folder)
    return getattr(model, "model", model)


@pytest.mark.parametrize(
    ("kind", "head", "method"),
    [
        ("Qwen3", "ForCausalLM", "last"),
        ("Qwen3", "Model", "last"),
        ("Llama", "Model", "mean"),
        ("Llama", "ForCausalLM", "mean"),
    ],
)
def test_decoders_are_pooled_as_their_files_say(
    tmp_path: Path, kind: str, head: str, method: str
) -> None:
    """With their head or saved without it; many texts together, and again in the same memory."""
    model = save_decoder(tmp_path, kind, head)
    write_pooling(tmp_path, method)
    embedder = load(tmp_path, max_num_batched_tokens=256)
    for lengths in ([16, 1, 33, 64, 17, 16], [2, 64, 64, 5], [1]):
        texts = texts_of(lengths)[::-1]
        vectors = embedder.embed(texts)
        for text, vector in zip(texts, vectors):
            with torch.no_grad():
                hidden = model(torch.tensor([text])).last_hidden_state[0]
            np.testing.assert_allclose(vector, pooled(hidden, method), rtol=1e-3, atol=1e-4)


def test_a_folder_without_modules_needs_to_be_told(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match='set "pooling" to "mean", "cls" or "last"'):
        load(tmp_path)
    embedder = load(tmp_path, pooling="cls")
    assert (embedder.limits.pooling.method, embedder.normalizes) == ("cls", True)
    write_pooling(tmp_path, "mean", modules=MODULES[:2])
    embedder = load(tmp_path)
    assert (embedder.limits.pooling.method, embedder.normalizes) == ("mean", False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modules.json": {"a": 1}}, "modules.json: is no list of modules"),
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode_max_tokens"),
        (
            {"1_Pooling/config.json": {
                "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True,
            }},
            "pooling_mode_mean_tokens, pooling_mode_cls_token is not supported",
        ),
        ({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}, "by weightedmean"),
        ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length"),
        ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
        (
            {"config_sentence_transformers.json": {
                "prompts": {"query": "Q: "}, "default_prompt_name": "query",
            }},
            "default_prompt_name",
        ),
    ],
)  # fmt: skip
def test_files_that_cannot_be_followed_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_pooling(tmp_path)
    for name, value in change.items():
        write_json(tmp_path / name, value)
    with pytest.raises(ModelConfigError, match=message):
        PoolingConfig.from_folder(tmp_path)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    write_pooling(tmp_path, modules=["Transformer", "Pooling", "Dense", "Normalize"])
    with pytest.raises(ModelConfigError, match="modules Transformer, Pooling, Dense, Normalize"):
        PoolingConfig.from_folder(tmp_path)


def test_newer_spellings_are_read(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 24})
    assert PoolingConfig.from_folder(tmp_path) == PoolingConfig("last", True, 24)


def test_limits(tmp_path: Path) -> None:
    save(tmp_path)
    write_pooling(tmp_path)
    assert load(tmp_path).limits.max_model_len == 40
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 24})
    limits = load(tmp_path).limits
    assert (limits.max_model_len, limits.dtype) == (24, torch.float32)
    assert load(tmp_path, max_model_len=30).limits.max_model_len == 30
    with pytest.raises(ConfigError, match="max_model_len must be at most 40"):
        load(tmp_path, max_model_len=41)
    assert load(tmp_path, dtype="bfloat16").limits.dtype is torch.bfloat16


def test_causal_is_what_decoders_are(tmp_path: Path) -> None:
    save_decoder(tmp_path, "Llama", "Model")
    write_pooling(tmp_path, "last")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    write_json(file, {**config, "is_causal": False})
    with pytest.raises(ModelConfigError, match="is_causal"):
        load(tmp_path)
    write_json(file, {**config, "num_hidden_layers": 4})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.3\.input_layernorm\.weight"):
        load(tmp_path)


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "mpnet", "architectures": ["MPNetModel"]})
    with pytest.raises(
        ModelConfigError, match="'mpnet' is not supported for embeddings; supported"
    ):
        load(tmp_path)
