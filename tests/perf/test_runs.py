"""The benchmarks on a tiny model: every request is timed, and gets all of its tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perf import engine, sharing, worker, workloads
from perf.workloads import RequestSpec
from tests.perf.mixed_run import SPECS, check


def test_the_engine(tiny_model: Path) -> None:
    loaded = engine.load({"model": str(tiny_model), "dtype": "float32", "num_blocks": "64"})
    check(*engine.run(loaded.engine, SPECS))
    assert "num_blocks=64" in loaded.limits
    with pytest.raises(RuntimeError, match="longer than the 256"):
        engine.run(loaded.engine, [RequestSpec((5,), 256)])


def test_what_sharing_saves(tiny_model: Path) -> None:
    loaded = engine.load(
        {"model": str(tiny_model), "dtype": "float32", "num_blocks": "200", "block_size": "4"}
        | {"enable_prefix_caching": "false"}
    )
    specs = [RequestSpec(tuple(range(5, 22)), 8)] * 2  # 4 full blocks and a partial one
    sampled = sharing.measure(
        loaded.engine, specs, lambda length: sharing.params_of("parallel sampling", 4, length)
    )
    # In 7 steps of the 8, 4 sequences hold 5 or 6 blocks each, of which 4 are held once.
    assert sampled["steps"] == 8
    assert 40 < sampled["saved_percent"] < 60
    beams = sharing.measure(
        loaded.engine, specs, lambda length: sharing.params_of("beam search", 4, length)
    )
    assert sampled["saved_percent"] <= beams["saved_percent"] < 75
    assert beams["unshared_blocks_mean"] == sampled["unshared_blocks_mean"]


def test_a_worker_runs_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_worker.py").write_text(
        "import os\nfrom perf.worker import answer\n"
        "answer(lambda name, rep: {name: float(rep), 'env': float(os.environ['N'])})\n"
    )
    root = Path(workloads.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    echo = worker.Worker.of_ours(["echo_worker"], {"N": "7"}, pause=True)
    echo.wait_until_ready()
    assert echo.measure("W1", 3) == {"W1": 3.0, "env": 7.0}
    assert echo.measure("W2", 4) == {"W2": 4.0, "env": 7.0}
    echo.close()
