"""Model repositories as operators write them: several instances, vLLM's settings, wrong ones."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as stock
from tritonclient.utils import InferenceServerException

from tests.e2e.metrics import Scrape
from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream, make_inputs, run
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "ignore_eos": True}


def add_model(repository: Path, name: str, settings: Mapping[str, Any], *, count: int = 1) -> None:
    """A model as ``trident serve`` lays it out, with ``count`` instances."""
    write_repository(repository, name, settings)
    file = repository / name / "config.pbtxt"
    text = file.read_text().replace("count: 1", f"count: {count}")
    file.write_text(text)


class Repository:
    """A server over a repository of its own, to which tests add models."""

    def __init__(self, folder: Path, server: RunningServer, settings: dict[str, Any]) -> None:
        self.folder, self.server, self.settings = folder, server, settings
        self.control = stock.InferenceServerClient(f"localhost:{server.grpc_port}")

    def load_error(self, name: str, settings: Mapping[str, Any]) -> str:
        add_model(self.folder, name, settings)
        with pytest.raises(InferenceServerException) as caught:
            self.control.load_model(name)
        assert not self.control.is_model_ready(name)
        return str(caught.value)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Repository]:
    """``pair`` has two instances and vLLM's settings."""
    folder = tmp_path_factory.mktemp("repository")
    settings = {"model": str(tiny_model), "dtype": "float32", "num_blocks": 100, "num_threads": 1}
    add_model(folder / "models", "llm", settings)
    vllm = {"enforce_eager": "true", "disable_log_requests": True, "gpu_memory_utilization": "0.1"}
    add_model(folder / "models", "pair", {**settings, **vllm, "max_waiting": "64"}, count=2)
    with RunningServer(
        folder, f"--model-repository={folder / 'models'}", "--model-control-mode=explicit",
        "--no-self-check",
    ) as server:  # fmt: skip
        made = Repository(folder / "models", server, settings)
        yield made
        made.control.close()


def short_inputs(max_tokens: int = 1) -> list[Any]:
    return make_inputs("hello", {**GREEDY, "max_tokens": max_tokens})


def test_two_instances_share_the_requests(repository: Repository) -> None:
    server = repository.server
    expected = run(server.grpc_port, short_inputs(8), model="pair")[0].as_numpy("text_output")
    with Stream(server.grpc_port) as stream:
        for number in range(40):
            stream.send("pair", short_inputs(8), request_id=str(number))
        results = stream.wait_for(40)
    assert all(result.as_numpy("text_output") == expected for result, _ in results)
    scrape = Scrape(server.metrics_port)
    served = {
        engine: scrape.total("vllm:request_success_total", engine=engine)
        for engine in ("pair_0_0", "pair_0_1")
    }
    assert sum(served.values()) == 41
    assert min(served.values()) > 0
    blocks = scrape.find(
        "nv_trt_llm_kv_cache_block_metrics", model="pair", kv_cache_block_type="max"
    )
    assert [sample.value for sample in blocks] == [99, 99]  # each has a pool of its own


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"invalid_argument": 1}, "unknown setting invalid_argument"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be a whole number"),
        ({"model": "invalid_model"}, "does not exist"),
        ({"model": ""}, "does not exist"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
        ({"max_model_len": 100000}, "max_model_len must be at most 256"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_fail_the_load_with_a_sentence(
    repository: Repository, settings: dict[str, Any], sentence: str
) -> None:
    name = f"wrong_{len(list(repository.folder.iterdir()))}"
    error = repository.load_error(name, {**repository.settings, **settings})
    assert sentence in error
    assert "Traceback" not in error


def test_a_model_that_was_put_right_loads(repository: Repository) -> None:
    assert "unknown setting" in repository.load_error("fixed", {**repository.settings, "x": 1})
    file = repository.folder / "fixed" / "1" / "model.json"
    file.write_text(json.dumps(repository.settings))
    try:
        status, _ = repository.server.post("/v2/repository/models/fixed/load", {})
    except urllib.error.HTTPError as error:
        status = error.code
    assert status == 200
    assert run(repository.server.grpc_port, short_inputs(2), model="fixed")
    repository.control.unload_model("fixed")
