"""What a process finds out about where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trident_llm.core.machine import find_interpreter


@pytest.mark.parametrize("executable", [None, "", "/opt/backend/triton_python_backend_stub"])
def test_the_interpreter_is_found_where_python_is_embedded(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if executable is not None:
        monkeypatch.setattr(sys, "executable", executable)
    found = find_interpreter()
    assert found is not None
    told = subprocess.run(
        [found, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == sys.prefix


def test_without_one_in_its_prefix_the_one_on_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path))
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_interpreter() is None
    (tmp_path / "python3").symlink_to(os.path.realpath("/bin/true"))
    assert find_interpreter() == tmp_path / "python3"
