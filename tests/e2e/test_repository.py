"""Model repositories as operators write them: Triton's own queue, several instances, wrong settings."""

from __future__ import annotations

import json
import shutil
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as stock
from tritonclient.utils import InferenceServerException

from tests.cli.command import wait_for
from tests.e2e.metrics import Scrape
from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream, make_inputs, run
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e

QUEUE = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy {
    max_queue_size: 2
    default_timeout_microseconds: 600000000
    allow_timeout_override: true
  }
}
"""
GREEDY = {"temperature": 0, "ignore_eos": True}


def add_model(
    repository: Path, name: str, settings: Mapping[str, Any], *, config: str = "", count: int = 1
) -> None:
    """A model as ``trident serve`` lays it out, with more in its config.pbtxt."""
    write_repository(repository, name, settings)
    file = repository / name / "config.pbtxt"
    text = file.read_text().replace("count: 1", f"count: {count}")
    file.write_text(text + config)


def without_end(model: Path, folder: Path) -> Path:
    """A copy of a model with a context so long that a request lasts until it is cancelled."""
    shutil.copytree(model, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 60_000}))
    return folder


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
    """``llm`` leaves requests in Triton's queue; ``pair`` has two instances and vLLM's settings."""
    folder = tmp_path_factory.mktemp("repository")
    settings = {"model": str(tiny_model), "dtype": "float32", "num_blocks": 100, "num_threads": 1}
    blocking = {"admission": "block", "max_waiting": 1, "max_num_seqs": 1, "num_blocks": 3300}
    endless = {"model": str(without_end(tiny_model, folder / "endless"))}
    add_model(folder / "models", "llm", {**settings, **blocking, **endless}, config=QUEUE)
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


def pending(server: RunningServer) -> float:
    """Requests in Triton's own queue."""
    return Scrape(server.metrics_port).total("nv_inference_pending_request_count", model="llm")


@contextmanager
def held_up(server: RunningServer) -> Iterator[None]:
    """While inside, one request is computed, one waits in the engine, one at its door, and one queues."""
    with Stream(server.grpc_port) as stream:
        for number in range(4):
            inputs = make_inputs("hello", {**GREEDY, "max_tokens": 50_000}, stream=number == 0)
            stream.send("llm", inputs)
            wait_for(lambda: stream.results, "the first one is computed")
        wait_for(lambda: pending(server) == 1, "the last one is in the queue")
        yield
        stream.cancel()


def test_tritons_queue_refuses_beyond_its_size_and_knows_priorities(repository: Repository) -> None:
    server = repository.server
    with Stream(server.grpc_port) as stream:
        with held_up(server):
            for number, (name, priority) in enumerate((("low", 2), ("high", 1)), start=2):
                stream.send("llm", short_inputs(), request_id=name, priority=priority)
                wait_for(lambda: pending(server) == number, f"{name} is in the queue")  # noqa: B023
            stream.send("llm", short_inputs(), request_id="refused", priority=2)
            ((_, error),) = stream.wait_for(1)
            assert "Exceeds maximum queue size" in str(error)
        results = stream.wait_for(3)
    order = [result.get_response().id for result, _ in results if result is not None]
    assert order == ["high", "low"]


def test_a_timeout_in_tritons_queue_and_a_cancel_at_its_head(repository: Repository) -> None:
    server = repository.server
    with Stream(server.grpc_port) as stream:
        with held_up(server):
            stream.send("llm", short_inputs(), request_id="late", timeout=1000)
            wait_for(lambda: pending(server) == 2, "the late one is in the queue")
        # The one at the door has left, so the next one is looked at, whose time has passed.
        ((_, error),) = stream.wait_for(1)
    assert "timeout" in str(error).lower()


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
