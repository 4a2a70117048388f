"""Small models that embed, as folders that users would have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.model.test_embedder import write_json, write_pooling
from tests.model.test_encoder import save

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "capital", "of", "france", "is", "paris", "a", "b",
    "##s", "##ing", "!", "one", "two", "three",
]  # fmt: skip
MAX_LENGTH = 24


def write_tiny_encoder(folder: Path) -> None:
    """A random BERT with a WordPiece tokenizer, whose file pads and truncates as MiniLM's does."""
    save(folder)
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    write_pooling(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH})
