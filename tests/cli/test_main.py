"""``trident`` where no server is needed: what is refused before one starts."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import free_ports
from tests.cli.test_checks import model_folder
from trident_llm.cli.main import main
from trident_llm.model.default_model import DefaultModelError


def ports() -> list[str]:
    http, grpc, metrics = free_ports(3)
    return [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]


@pytest.fixture
def a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An option that names a server which must not be started."""
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\nexit 1\n")
    binary.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return f"--tritonserver={binary}"


def test_mistakes_are_one_sentence_and_status_1(
    a_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert main(["serve", a_server, *ports(), *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch(r"error: [^\n]+\n", captured.err)
        assert list((tmp_path / "temporary").iterdir()) == []
        return captured.err

    assert "does not exist" in refusal("--model", str(tmp_path / "absent"))
    assert "config.json" in refusal("--model", str(tmp_path))
    assert "block_size" in refusal("--block-size", "0")
    assert "no model named llm" in refusal("--model-repository", str(tmp_path))
    assert "cannot be written" in refusal(
        "--model-repository", str(tmp_path), "--model-name", "bin", "--log-file", "/proc/no/log"
    )
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        assert f"port {port} is in use" in refusal(f"--metrics-port={port}")


def test_the_default_model_is_fetched_into_trident_home(
    a_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Path] = []

    def fetch(name: str, home: Path, progress: object) -> Path:
        assert callable(progress)
        progress("download", 0, 1)
        progress("convert", 1, 2)
        asked.append(home)
        return tmp_path / "fetched"

    monkeypatch.setattr("trident_llm.model.default_model.fetch_model", fetch)
    monkeypatch.setenv("TRIDENT_HOME", str(tmp_path / "home"))
    assert main(["serve", a_server, *ports()]) == 1
    assert asked == [tmp_path / "home"]
    captured = capsys.readouterr()
    assert "fetching the default model" in captured.out
    assert re.search(r"^  model +\d+\.\d s$", captured.out, re.MULTILINE)
    assert f"{tmp_path}/fetched does not exist" in captured.err


def test_an_embedding_model_that_cannot_be_fetched_can_be_left_out(
    a_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fetch(name: str, home: Path, progress: object) -> Path:
        assert name == "all-minilm-l6-v2"
        raise DefaultModelError("no network")

    monkeypatch.setattr("trident_llm.model.default_model.fetch_model", fetch)
    model = model_folder(tmp_path)
    arguments = ["serve", a_server, *ports(), f"--model={model}", "--embedding-model=default"]
    assert main(arguments) == 1
    assert "error: no network; --embedding-model none serves without it" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy() -> None:
    program = (
        "import sys, trident_llm.cli.main; "
        "print({'torch', 'numpy', 'numba', 'trident_llm.serving'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
