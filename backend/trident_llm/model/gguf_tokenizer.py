"""The tokenizer inside a GGUF file, as the files of a Hugging Face folder.

Owns the translation of llama.cpp's tokenizer metadata to a ``tokenizers`` pipeline. It knows nothing
of tensors. Invariant: ids equal those of the model's original tokenizer; a vocabulary whose splitting
rule is not known exactly is refused by name rather than approximated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from trident_llm.model.gguf import GgufError, GgufFile

# Token types of llama.cpp.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """How a byte-level vocabulary cuts text before its merges apply."""

    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # every digit alone, before anything else
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_GPT2 = _Splitting()
_SMOLLM = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = _Splitting(_QWEN2_SPLIT, nfc=True)
_SPLITTINGS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _Splitting(_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}

_SPECIAL_NAMES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json into ``folder``.

    Raises :class:`GgufError` when the file has no tokenizer or one of an unsupported kind.
    """
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    special = _special_tokens(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.get(".context_length", 0)) or None,
        **special,
    }
    template = file.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    for name, content in (("tokenizer_config", config), ("special_tokens_map", special)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""
    kind = file.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(file)
    else:
        raise GgufError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' and "
            "'llama'"
        )
    tokens, types = _vocabulary(file)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types)
            if token_type == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, token_type in zip(tokens, types)
            if token_type == _USER_DEFINED
        ]
    )
    _add_template(tokenizer, file, add_bos)
    if tokenizer.get_vocab_size() != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.tokens holds the same token twice")
    return tokenizer


def _byte_level(file: GgufFile) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre")
    splitting = _SPLITTINGS.get(str(name))
    if splitting is None:
        raise GgufError(
            f"{file.path}: tokenizer.ggml.pre {name!r} is not supported; supported are "
            f"{', '.join(_SPLITTINGS)}. Use the model's Hugging Face folder instead"
        )
    tokens, _ = _vocabulary(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(file, merge) for merge in file.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges)
    )
    steps: list[Any] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, splitting.add_bos


def _sentencepiece(file: GgufFile) -> tuple[Tokenizer, bool]:
    tokens, _ = _vocabulary(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    given = file.get("tokenizer.ggml.merges")
    merges = (
        [_pair(file, merge) for merge in given] if given else list(_merges_from_scores(file, vocab))
    )
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges,
            unk_token=None if unknown is None else _token(file, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges_from_scores(file: GgufFile, vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Merges that make BPE choose as SentencePiece does: the pair whose result scores highest."""
    tokens, types = _vocabulary(file)
    scores = file.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.scores must have one entry per token")
    mergeable = [i for i, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)]
    for index in sorted(mergeable, key=lambda i: -scores[i]):
        token = tokens[index]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        yield from sorted(
            ((left, right) for left, right in pairs if left in vocab and right in vocab),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )


def _add_template(tokenizer: Tokenizer, file: GgufFile, add_bos: bool) -> None:
    """What surrounds an encoded text: the tokens the file says to add."""
    special = _special_tokens(file)
    before, after, used = "", "", []
    if file.get("tokenizer.ggml.add_bos_token", add_bos) and special.get("bos_token"):
        before = special["bos_token"] + " "
        used.append(special["bos_token"])
    if file.get("tokenizer.ggml.add_eos_token", False) and special.get("eos_token"):
        after = " " + special["eos_token"]
        used.append(special["eos_token"])
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{after}",
            pair=f"{before}$A{after} {before}$B{after}",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(used)],
        )


def _vocabulary(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise GgufError(f"{file.path}: has no tokenizer.ggml.tokens; it holds no tokenizer")
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise GgufError(f"{file.path}: tokenizer.ggml.token_type must have one entry per token")
    return tokens, types


def _special_tokens(file: GgufFile) -> dict[str, str]:
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_NAMES.items()}
    return {name: _token(file, index) for name, index in ids.items() if index is not None}


def _token(file: GgufFile, index: int) -> str:
    tokens, _ = _vocabulary(file)
    if not 0 <= index < len(tokens):
        raise GgufError(f"{file.path}: special token id {index} is outside the vocabulary")
    return tokens[index]


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right) or " " in right:
        raise GgufError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, not a pair of tokens")
    return left, right
