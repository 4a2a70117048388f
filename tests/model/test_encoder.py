"""Encoders of the BERT family: the hidden states of transformers, whatever texts come together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trident_llm.model.config import ModelConfigError
from trident_llm.model.encoder import Encoder
from trident_llm.model.encoder_config import EncoderConfig
from trident_llm.model.loader import ModelLoadError

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 40, "initializer_range": 0.4,
}  # fmt: skip


def save(folder: Path, kind: str = "Bert", head: str = "Model", **values: Any) -> Any:
    """A random model of transformers, saved in ``folder``; every parameter is random."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **values}, dtype="float32")
    options = {"add_pooling_layer": True} if head == "Model" else {}
    model = getattr(transformers, kind + head)(config, **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.3 + scale)
    model.save_pretrained(folder)
    return model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    config = EncoderConfig.from_dict(json.loads((folder / "config.json").read_text()))
    return Encoder.load(folder, config, dtype=dtype, device=CPU)


def texts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    return [torch.randint(3, 120, (n,), generator=generator).tolist() for n in sorted(lengths)]


def assert_equal_to(model: Any, encoder: Encoder, texts: list[list[int]]) -> None:
    hidden = encoder.hidden(texts)
    body = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        expected = [body(torch.tensor([text])).last_hidden_state[0] for text in texts]
    torch.testing.assert_close(hidden, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Encoder]:
    folder = tmp_path_factory.mktemp("bert")
    return save(folder), load(folder)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_hidden_states_equal_transformers(bert: tuple[Any, Encoder], lengths: list[int]) -> None:
    assert_equal_to(*bert, texts_of(lengths))


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=12), data=st.data())
def test_a_text_does_not_see_its_neighbours(
    bert: tuple[Any, Encoder], lengths: list[int], data: st.DataObject
) -> None:
    encoder, texts = bert[1], texts_of(lengths)
    index = data.draw(st.integers(0, len(texts) - 1))
    start = sum(map(len, texts[:index]))
    among = encoder.hidden(texts)[start : start + len(texts[index])]
    torch.testing.assert_close(among, encoder.hidden([texts[index]]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "head", "values"),
    [
        ("Bert", "ForMaskedLM", {}),
        ("Bert", "Model", {"hidden_act": "relu", "type_vocab_size": 1}),
        ("Bert", "Model", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
        ("Roberta", "Model", {"type_vocab_size": 1}),
        ("Roberta", "ForMaskedLM", {"pad_token_id": 2, "layer_norm_eps": 1e-5}),
        ("XLMRoberta", "Model", {"type_vocab_size": 1}),
    ],
)
def test_relatives_equal_transformers(
    tmp_path: Path, kind: str, head: str, values: dict[str, Any]
) -> None:
    model = save(tmp_path, kind, head, **values)
    encoder = load(tmp_path)
    longest = encoder.config.max_supported_len
    assert longest == 40 - (0 if kind == "Bert" else values.get("pad_token_id", 1) + 1)
    assert_equal_to(model, encoder, texts_of([1, 5, 5, longest]))


def test_bfloat16_comes_close(bert: tuple[Any, Encoder], tmp_path: Path) -> None:
    save(tmp_path)
    texts = texts_of([3, 9, 9, 30])
    exact, rounded = bert[1].hidden(texts), load(tmp_path, torch.bfloat16).hidden(texts)
    assert rounded.dtype is torch.bfloat16
    assert torch.cosine_similarity(exact, rounded.float()).min() > 0.99


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "deberta"}, "model_type: 'deberta' is not supported; supported encoders"),
        ({"hidden_act": "silu"}, "hidden_act: 'silu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ({"is_decoder": True}, "is_decoder: true"),
        ({"num_attention_heads": 5}, "must be a multiple of num_attention_heads"),
        ({"hidden_size": "32"}, "hidden_size: must be an integer"),
        ({"model_type": "roberta", "max_position_embeddings": 2}, "max_position_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        EncoderConfig.from_dict({"model_type": "bert", **SIZES, **values})


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "encoder.layer.1.output.dense.bias"
    save_file({key: value for key, value in whole.items() if key != name}, file)
    with pytest.raises(ModelLoadError, match=f"tensor {name} is missing"):
        load(tmp_path)
    save_file({**whole, "encoder.layer.3.output.dense.bias": whole[name].clone()}, file)
    with pytest.raises(ModelLoadError, match=r"encoder\.layer\.3\.output\.dense\.bias is in the"):
        load(tmp_path)
    save_file({**whole, name: whole[name][:-1].clone()}, file)
    with pytest.raises(ModelLoadError, match=r"has shape \[31\]"):
        load(tmp_path)
