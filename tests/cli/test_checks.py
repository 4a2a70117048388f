from __future__ import annotations

import errno
import json
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from trident_llm.cli import checks
from trident_llm.cli.errors import CommandError, describe
from trident_llm.core.config import EngineConfig

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def model_folder(path: Path, **changes: object) -> Path:
    path.joinpath("config.json").write_text(json.dumps({**_CONFIG, **changes}))
    return path


def test_a_model_folder_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert checks.check_model(tmp_path.name, EngineConfig()) == tmp_path


def test_broken_folders_are_one_sentence_with_the_path(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(CommandError) as refused:
            checks.check_model(str(folder), EngineConfig())
        assert str(folder) in str(refused.value)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    assert "JSON" in refusal(tmp_path)
    model_folder(tmp_path, architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in refusal(tmp_path)
    model_folder(tmp_path, num_attention_heads=-1)
    assert "num_attention_heads" in refusal(tmp_path)


def test_too_little_memory_is_said_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "available_memory", lambda: 2**30)
    model_folder(tmp_path, hidden_size=1024, vocab_size=200_000)  # 0.8 GB of embeddings in bf16
    cpu = EngineConfig(device="cpu")
    with pytest.raises(CommandError, match=r"too little memory.*bfloat16.*1\.0 GiB are available"):
        checks.check_model(str(tmp_path), cpu)
    # What a GPU has free is the loader's question.
    checks.check_model(str(tmp_path), EngineConfig(device="cuda"))
    model_folder(tmp_path)
    checks.check_model(str(tmp_path), cpu)
    with pytest.raises(CommandError, match=r"2\.0 GiB for the KV pool.*a smaller KV pool"):
        checks.check_model(str(tmp_path), EngineConfig(device="cpu", kv_cache_memory_bytes=2**31))


def test_float32_needs_twice_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path, hidden_size=1024, vocab_size=100_000)  # 0.41 GB in bf16
    monkeypatch.setattr(checks, "available_memory", lambda: 1000 * 2**20)
    checks.check_model(str(tmp_path), EngineConfig(device="cpu", dtype="bfloat16"))
    with pytest.raises(CommandError, match="float32"):
        checks.check_model(str(tmp_path), EngineConfig(device="cpu", dtype="float32"))


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_port_in_use_is_named_with_its_option(address: str) -> None:
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(CommandError, match=rf"port {port} is in use.*--grpc-port"):
            checks.check_ports({"--grpc-port": port})
    checks.check_ports({"--grpc-port": port})


def test_a_setting_out_of_range_is_refused() -> None:
    assert checks.check_settings({"block_size": 32}).block_size == 32
    with pytest.raises(CommandError, match="block_size must be at least 1"):
        checks.check_settings({"block_size": 0})


@pytest.mark.parametrize(("free_mib", "warned"), [(63, True), (65, False)])
def test_little_shared_memory_is_warned_about(
    free_mib: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(f_bavail=free_mib * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    warning = checks.shared_memory_warning()
    assert (warning is not None) == warned
    assert warning is None or "63 MiB" in warning


@pytest.mark.parametrize(
    ("now", "most", "raised"),
    [
        (64, 300, (300, 300)),
        (1024, 2**30, (65536, 2**30)),
        (1024, resource.RLIM_INFINITY, (65536, resource.RLIM_INFINITY)),
        (100_000, 2**30, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_is_raised(
    now: int, most: int, raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: told.append(limits))
    checks.raise_open_files_limit()
    assert told == ([] if raised is None else [raised])


def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 128))
    with pytest.raises(CommandError, match=r"only 128 files may be open .*ulimit -n"):
        checks.raise_open_files_limit()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left", "/a/b"), "/a/b: No space left; make room there"),
        (OSError(errno.ENOSPC, "Full", "/from", None, "/to"), "/to: Full; make room there"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit"),
        (OSError("odd"), "odd"),
    ],
)
def test_what_the_machine_refuses_is_a_sentence(error: OSError, said: str) -> None:
    assert describe(error).startswith(said)


def test_a_model_that_embeds_is_looked_at_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is no folder; --embedding-model names"):
        checks.check_embedding_model(str(tmp_path / "none"), {})
    with pytest.raises(CommandError, match="has no modules"):
        checks.check_embedding_model(str(tmp_path), {})
    with pytest.raises(CommandError, match="unknown setting block_size"):
        checks.check_embedding_model(str(tmp_path), {"block_size": 16})
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_act": "swish"}')
    with pytest.raises(CommandError, match=f"{tmp_path}: hidden_act: 'swish' is not supported"):
        checks.check_embedding_model(str(tmp_path), {"pooling": "cls"})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert checks.check_embedding_model(str(tmp_path), {"pooling": "cls"}) == tmp_path
