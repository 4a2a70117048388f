"""What cannot be repaired in the server: it is told, and the server is started anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.command import wait_for
from tests.e2e.server import RunningServer
from trident_client import ServerError
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e


def test_an_engine_that_died_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"model": str(tiny_model), "dtype": "float32", "num_blocks": 40}
    write_repository(tmp_path / "models", "llm", settings)
    version = tmp_path / "models" / "llm" / "1"
    shutil.copy(Path(__file__).parent / "failing_model" / "model.py", version)
    with RunningServer(
        tmp_path, f"--model-repository={tmp_path / 'models'}", "--no-self-check"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", max_tokens=4, temperature=0, ignore_eos=True).text
        (version / "broken").touch()
        for _ in range(3):  # as many as it takes to give up
            with pytest.raises(ServerError) as caught:
                client.generate("hello", max_tokens=4)
            assert caught.value.code == "INTERNAL"
        (version / "broken").unlink()
        wait_for(lambda: "ready again after" in server.log, "the server is restarted")
        assert "error: the engine has failed and computes nothing" in server.log
        again = client.generate("hello", max_tokens=4, temperature=0, ignore_eos=True)
        assert again.text == expected
        assert server.idle_stats()["num_requests"] == 0
