"""Models that tests of several rooms share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.text.tokenizer_builders import BYTE_LEVEL_CONFIG, make_byte_level

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's folder, fetched and converted once."""
    from trident_llm.model.default_model import fetch_default_model

    home = os.environ.get("TRIDENT_HOME", "~/.cache/trident")
    return fetch_default_model(Path(home).expanduser())


@pytest.fixture(scope="session")
def default_embedding_model() -> Path:
    """The folder of the default model that embeds, fetched once."""
    from trident_llm.model.default_model import default_home, fetch_default_embedding_model

    return fetch_default_embedding_model(default_home())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose head is wider than its tokenizer; ids repeat little."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def write_tiny_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_byte_level()
    size = max(tokenizer.get_vocab().values()) + 1
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size + 20,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**BYTE_LEVEL_CONFIG, "chat_template": CHAT_TEMPLATE})
    )
