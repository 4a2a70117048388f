"""Tokenizers of GGUF files: against Hugging Face's own loader and against the originals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trident_llm.model.gguf import GgufError, GgufFile
from trident_llm.model.gguf_tokenizer import build_tokenizer, write_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's 1234567 times.",
    "def f(x):\n    return x ** 2  # 3.14159\n\n\n\tprint(f(10))\r\n",
    "Zażółć gęślą jaźń. 你好世界 Straße 🙂🙂 naïve café",
    "WE'LL see; I'm sure THEY'VE gone...   spaces   and\ttabs  12  345",
]
TEXTS = [
    *CORPUS,
    "",
    "x",
    "Hello world",
    "   three before",
    "<s>marked</s> and <think> kept <s>",
    "unseen: Ω≈ç√∫ \x00 ٣٤ ½ 漢字",
    "trailing spaces   ",
    "a\n\n\n  b",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level(*steps: Any) -> Tokenizer:
    """A byte-level vocabulary trained on the corpus; ``steps`` split text before it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    if steps and isinstance(steps[0], pre_tokenizers.Digits):
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, split])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """A vocabulary in SentencePiece's spelling, with byte tokens for what it lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *byte_tokens], show_progress=False
    )
    words = [word for line in CORPUS for word in line.replace(" ", " ▁").split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    reloaded = json.loads(tokenizer.to_str())
    # Byte tokens are pieces, not added tokens.
    reloaded["added_tokens"] = [t for t in reloaded["added_tokens"] if t["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(reloaded))


def write(
    folder: Path, tokenizer: Tokenizer, model: str, pre: str | None, **flags: bool
) -> GgufFile:
    """A GGUF that holds ``tokenizer``."""
    path = folder / "tokenizer.gguf"
    out = GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(128)
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [TokenType.NORMAL] * len(tokens)
    for token in tokens:
        if token in SPECIAL:
            types[vocab[token]] = TokenType.CONTROL
        elif token == "<think>":
            types[vocab[token]] = TokenType.USER_DEFINED
        elif token.startswith("<0x"):
            types[vocab[token]] = TokenType.BYTE
    out.add_tokenizer_model(model)
    out.add_token_list(tokens)
    out.add_token_types(types)
    if pre is not None:
        out.add_tokenizer_pre(pre)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    if model == "gpt2":
        out.add_token_merges(merges)
    else:
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed([*enumerate(merges)])}
        out.add_token_scores([-float(ranks.get(token, 10_000)) for token in tokens])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(CHAT_TEMPLATE)
    for name, value in flags.items():
        out.add_bool(f"tokenizer.ggml.{name}", value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return GgufFile(path)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize(
    ("pre", "steps"),
    [
        ("gpt-2", ()),
        ("smollm", (pre_tokenizers.Digits(individual_digits=True),)),
        ("llama-bpe", (pre_tokenizers.Split(Regex(LLAMA3), "isolated"),)),
        ("qwen2", (pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),)),
    ],
    ids=["gpt-2", "smollm", "llama-bpe", "qwen2"],
)
def test_byte_level_equals_the_original(tmp_path: Path, pre: str, steps: tuple[Any, ...]) -> None:
    original = byte_level(*steps)
    restored = build_tokenizer(write(tmp_path, original, "gpt2", pre))
    for text in TEXTS:
        assert ids(restored, text) == ids(original, text), text
        found = ids(restored, text)
        assert restored.decode(found, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_equals_the_loader_of_transformers(tmp_path: Path, pre: str) -> None:
    file = write(tmp_path, byte_level(), "gpt2", pre, add_bos_token=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.path.name)
    ours = build_tokenizer(file)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids, text


def test_only_some_vocabularies_take_a_piece_that_is_a_token_whole(tmp_path: Path) -> None:
    def encode(pre: str) -> list[str]:
        file = write(tmp_path, byte_level(), "gpt2", pre, add_bos_token=False)
        file.metadata["tokenizer.ggml.tokens"].append("zzqq")  # no merges lead to it
        file.metadata["tokenizer.ggml.token_type"].append(TokenType.NORMAL)
        tokens: list[str] = build_tokenizer(file).encode("zzqq").tokens
        return tokens

    assert encode("llama-bpe") == ["zzqq"]
    assert len(encode("gpt-2")) > 1


def test_qwen_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path, byte_level(), "gpt2", "qwen2"))
    assert ids(tokenizer, "cafe\u0301") == ids(tokenizer, "caf\u00e9")


def test_sentencepiece_equals_the_original_and_transformers(tmp_path: Path) -> None:
    original = sentencepiece_like()
    file = write(tmp_path, original, "llama", None)
    ours = build_tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.path.name)
    for text in TEXTS:
        if "<" not in text:
            assert ids(ours, text) == ids(original, text), text
            assert ours.encode(text).ids == [1, *ids(original, text)]
            assert ours.decode(ids(ours, text)) == text
        # transformers leaves out the prefix where a text begins with spaces or a special token.
        if "<" not in text and not text.startswith(" ") and text:
            assert ours.encode(text).ids == theirs(text).input_ids, text


def test_sentencepiece_without_a_space_prefix(tmp_path: Path) -> None:
    file = write(
        tmp_path, sentencepiece_like(), "llama", None, add_space_prefix=False, add_bos_token=False
    )
    tokenizer = build_tokenizer(file)
    assert "".join(tokenizer.encode("the dog").tokens) == "the▁dog"
    assert tokenizer.decode(tokenizer.encode(" the dog").ids) == " the dog"


def test_added_tokens_stay_whole_and_only_control_tokens_are_special(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write(tmp_path, byte_level(), "gpt2", "gpt-2"))
    found = tokenizer.encode("a<s>b<think>c").tokens
    assert found == ["a", "<s>", "b", "<think>", "c"]
    assert tokenizer.decode(tokenizer.encode("a<s>b<think>c").ids) == "ab<think>c"


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, ["x"]),
        ("gpt-2", {"add_bos_token": True}, ["<s>", "x"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "x", "</s>"]),
        ("llama-bpe", {}, ["<s>", "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
    ],
)
def test_begin_and_end_tokens(
    tmp_path: Path, pre: str, flags: dict[str, bool], expected: list[str]
) -> None:
    tokenizer = build_tokenizer(write(tmp_path, byte_level(), "gpt2", pre, **flags))
    assert tokenizer.encode("x").tokens == expected


def test_written_files_are_what_transformers_reads(tmp_path: Path) -> None:
    file = write(tmp_path, byte_level(), "gpt2", "smollm", add_bos_token=True)
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer(file, folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")
    assert loaded.model_max_length == 128
    assert loaded.chat_template == CHAT_TEMPLATE
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert loaded(text).input_ids == tokenizer.encode(text).ids
    special = json.loads((folder / "special_tokens_map.json").read_text())
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("gpt2", "viking", "tokenizer.ggml.pre 'viking' is not supported; supported are gpt-2"),
        ("gpt2", None, "tokenizer.ggml.pre None is not supported"),
        ("t5", None, "tokenizer.ggml.model 't5' is not supported"),
    ],
)
def test_unknown_kinds_are_refused_by_name(
    tmp_path: Path, model: str, pre: str | None, message: str
) -> None:
    file = write(tmp_path, byte_level(), model, pre)
    with pytest.raises(GgufError, match=message):
        build_tokenizer(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", None, "holds no tokenizer"),
        ("token_type", [1], "token_type must have one entry per token"),
        ("merges", ["abc"], "merges holds 'abc', not a pair"),
        ("bos_token_id", 10**6, "special token id 1000000 is outside"),
    ],
)
def test_inconsistent_metadata(tmp_path: Path, key: str, value: Any, message: str) -> None:
    file = write(tmp_path, byte_level(), "gpt2", "gpt-2", add_bos_token=True)
    file.metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(GgufError, match=message):
        build_tokenizer(file)
