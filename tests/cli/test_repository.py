from __future__ import annotations

import json
from pathlib import Path

import pytest

from trident_llm.cli.errors import CommandError
from trident_llm.cli.repository import check_repository, drain_seconds, write_repository

_SHIPPED = Path(__file__).parents[2] / "model_repository" / "llm"


def test_writes_the_shipped_model_with_the_user_s_settings(tmp_path: Path) -> None:
    write_repository(tmp_path / "models", "chat", {"model": "/m", "max_num_seqs": 8})
    model = tmp_path / "models" / "chat"
    shipped = (_SHIPPED / "config.pbtxt").read_text()
    assert (model / "config.pbtxt").read_text() == shipped.replace('name: "llm"\n', "")
    assert (model / "1" / "model.py").read_bytes() == (_SHIPPED / "1" / "model.py").read_bytes()
    settings = json.loads((model / "1" / "model.json").read_text())
    assert settings == {"model": "/m", "max_num_seqs": 8}


def test_writes_the_shipped_model_that_embeds(tmp_path: Path) -> None:
    write_repository(tmp_path, "embed", {"model": "/e"}, template="embed")
    shipped = _SHIPPED.parent / "embed"
    for name in ("config.pbtxt", "1/model.py"):
        assert (tmp_path / "embed" / name).read_bytes() == (shipped / name).read_bytes()
    assert json.loads((tmp_path / "embed/1/model.json").read_text()) == {"model": "/e"}


def test_a_repository_must_hold_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "llm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert check_repository(Path("models"), "llm") == tmp_path / "models"
    with pytest.raises(CommandError, match="no model named chat"):
        check_repository(Path("models"), "chat")


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        ('{"drain_seconds": 3}', 3.0),
        ('{"drain_seconds": "4.5"}', 4.5),
        ("{}", 10.0),
        ("[]", 10.0),
        ("nonsense", 10.0),
        ('{"drain_seconds": -1}', 10.0),
        ('{"drain_seconds": Infinity}', 10.0),
        (None, 10.0),
    ],
)
def test_reads_how_long_a_model_drains(content: str | None, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "llm" / "1").mkdir(parents=True)
    if content is not None:
        (tmp_path / "llm" / "1" / "model.json").write_text(content)
    assert drain_seconds(tmp_path, "llm") == seconds
