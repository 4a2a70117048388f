"""``trident-client openai``: its options, and what it says where it cannot start."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from trident_client import TLS
from trident_client.cli import main
from trident_client.openai import command
from trident_client.openai.output.parser import REASONING_PARSERS, TOOL_PARSERS
from trident_client.openai.settings import GatewaySettings


def settings_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    """What the command line makes of these arguments."""
    seen: list[GatewaySettings] = []

    def run(parsed: argparse.Namespace) -> int:
        seen.append(command.settings_of(parsed))
        return 0

    monkeypatch.setattr(command, "run", run)
    assert main(["openai", *arguments]) == 0
    return seen[0]


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(monkeypatch=monkeypatch) == GatewaySettings()


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_of(
        "--url=server:1", "--model=a", "--model=b", "--model=a", "--host=0.0.0.0", "--port=2",
        "--workers=3", "--api-key-file=keys", "--max-requests-per-key=4", "--max-body-bytes=5",
        "--cors-origin=https://x", "--metrics-url=http://y", "--tool-parser=mistral",
        "--reasoning-parser=open", "--tls", "--timeout=6", "--header=k:v", "--no-page", "--max-tokens-per-minute-per-key=7", "--stop-at-eof",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert settings == GatewaySettings(
        url="server:1", models=("a", "b"), host="0.0.0.0", port=2, workers=3, api_key_file="keys",
        max_requests_per_key=4, max_body_bytes=5, cors_origins=("https://x",),
        metrics_url="http://y", tool_parser="mistral", reasoning_parser="open", tls=True, timeout=6, page=False,
        max_tokens_per_minute_per_key=7,
        headers=(("k", "v"),), stop_at_eof=True,
    )  # fmt: skip
    assert GatewaySettings.from_json(settings.to_json()) == settings
    assert settings.ssl() is True
    certificate = tmp_path / "ca.pem"
    certificate.write_bytes(b"PEM")
    assert GatewaySettings(ca=str(certificate)).ssl() == TLS(root_certificates=b"PEM")


def test_the_parsers_that_can_be_chosen_are_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions}
    assert choices["tool_parser"] == TOOL_PARSERS
    assert choices["reasoning_parser"] == REASONING_PARSERS


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["openai"]) == 1
    assert "pip install 'trident-client[openai]'" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "# nothing\n"])
def test_keys_that_were_asked_for_must_be_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    assert main(["openai", f"--api-key-file={file}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trident-client: ")
    assert str(file) in error
    assert len(error.splitlines()) == 1
