from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.mixed import compare


@pytest.mark.parametrize("depth", [0, 1])
def test_150_requests_that_preempt_each_other_get_their_own_texts(
    tiny_model: Path, depth: int
) -> None:
    assert compare(tiny_model, 150, depth=depth) > 50
