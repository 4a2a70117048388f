"""Small tokenizers of every family, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SENTENCES = [
    "Daenerys is the Khaleesi of the great grass sea, and the mother of dragons.",
    "hello world, hello there: the quick brown fox jumps over the lazy dog",
    "system user assistant tool You are a helpful assistant. What is the weather in Paris?",
    'def add(a, b):\n    return a + b\n\n{"name": "add", "arguments": {"a": 1, "b": 23}}',
    "Grüße aus München, 日本語のテキスト и немного по-русски. 12345 67890",
]

Save = Callable[[Tokenizer, Mapping[str, Any]], Path]


def train_bpe(pre_tokenizer: Any, vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet()
        if isinstance(pre_tokenizer, pre_tokenizers.ByteLevel)
        else []
    )
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def make_byte_level() -> Tokenizer:
    """Byte-level BPE as in SmolLM2 and Qwen: no BOS, no emoji in one token, one plain added token."""
    tokenizer = train_bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        500,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


BYTE_LEVEL_CONFIG = {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}


def make_sentencepiece(*, prepend: str = "first", decoder: Any = None) -> Tokenizer:
    """BPE with byte fallback as in Llama 2; prepend "normalizer" is its oldest form."""
    scheme = "always" if prepend == "normalizer" else prepend
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    trained = json.loads(train_bpe(pre_tokenizers.Metaspace(), 400).to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in trained["vocab"] if piece not in pieces]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = metaspace
    tokenizer.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


SENTENCEPIECE_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_wordpiece() -> Tokenizer:
    """WordPiece as in BERT."""
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##ing", "##ly", "sing", ",", ".", "a"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


WORDPIECE_CONFIG = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
