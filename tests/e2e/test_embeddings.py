"""Two models on one real server: one that generates and the default one that embeds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.cli.command import Serve, free_ports, wait_for
from tests.e2e.server import RunningServer
from tests.model.embedding_models import write_tiny_encoder
from tests.model.embedding_oracle import Oracle, mixed_texts, worst_distance
from trident_client import Client, InvalidArgument, TridentError

pytestmark = pytest.mark.e2e

BOUND = 1e-4
TEXTS = [text for text in mixed_texts(120) if len(text) < 400][:60]


class Served:
    """A server, the port of its gateway, and what its model that embeds should say."""

    def __init__(self, server: RunningServer, port: int, folder: Path) -> None:
        self.server = server
        self.openai = OpenAI(
            base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=120
        )
        oracle = Oracle(folder)
        self.expected = [oracle.vector(text) for text in TEXTS]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, default_embedding_model: Path
) -> Iterator[Served]:
    (port,) = free_ports(1)
    with RunningServer(
        tmp_path_factory.mktemp("embeddings"),
        f"--model={tiny_model}", "--dtype=float32", "--num-blocks=200", "--no-self-check",
        "--embedding-model=default", f"--openai-port={port}",
    ) as server:  # fmt: skip
        yield Served(server, port, default_embedding_model)


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.server.client(model="embed", retries=0) as client:
        yield client


def test_vectors_are_sentence_transformers_one_by_one_and_together(
    served: Served, client: Client
) -> None:
    together = client.embed(TEXTS)
    assert together.vectors.shape == (len(TEXTS), 384)
    assert worst_distance(together.vectors, served.expected) < BOUND
    alone = [client.embed(text) for text in TEXTS[:20]]
    assert worst_distance([result.vector for result in alone], served.expected[:20]) < BOUND
    counts = [result.usage.prompt_tokens for result in alone]
    assert counts == [len(client.tokenize(text)) for text in TEXTS[:20]]
    ids = client.embed([client.tokenize(text) for text in TEXTS[:20]])
    assert worst_distance(ids.vectors, served.expected[:20]) < BOUND
    assert ids.usage.prompt_tokens == sum(count or 0 for count in counts)


def test_openais_client(served: Served) -> None:
    client = served.openai
    assert [model.id for model in client.models.list()] == ["llm", "embed"]
    options: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]  # alone it asks for base64
    for option in options:
        answer = client.embeddings.create(model="embed", input=TEXTS, **option)
        assert [item.index for item in answer.data] == list(range(len(TEXTS)))
        found = [np.array(item.embedding, np.float32) for item in answer.data]
        assert worst_distance(found, served.expected) < BOUND
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 2 * len(TEXTS)
    short = client.embeddings.create(model="embed", input=TEXTS[3], dimensions=64)
    vector = np.array(short.data[0].embedding, np.float32)
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert worst_distance([vector], [served.expected[3][:64]]) < BOUND
    for wrong, param in (({"dimensions": 385}, "dimensions"), ({"input": "a " * 300}, "input")):
        given: dict[str, Any] = {"model": "embed", "input": "a", **wrong}
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(**given)
        assert caught.value.param == param


def test_both_models_work_at_the_same_time(served: Served, client: Client) -> None:
    with served.server.client() as generator, ThreadPoolExecutor(16) as threads:
        options: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
        alone = generator.generate("hello", **options).text
        texts = [threads.submit(generator.generate, "hello", **options) for _ in range(8)]
        vectors = [threads.submit(client.embed, text) for text in TEXTS[:40]]
        assert [each.result().text for each in texts] == [alone] * 8
        found = [each.result().vector for each in vectors]
    assert worst_distance(found, served.expected[:40]) < BOUND


def test_http_and_what_each_model_refuses(served: Served, client: Client) -> None:
    status, text = served.server.post(
        "/v2/models/embed/generate", {"text_input": TEXTS[0], "dimensions": 8}
    )
    assert status == 200
    assert worst_distance([json.loads(text)["embedding"]], [served.expected[0][:8]]) < BOUND
    asked = {"embedding_request": json.dumps({"input": TEXTS[0]}), "return_num_input_tokens": True}
    status, text = served.server.post("/v2/models/embed/generate", asked)
    answer = json.loads(text)
    assert worst_distance([json.loads(answer["text_output"])], served.expected[:1]) < BOUND
    assert answer["num_input_tokens"] == len(client.tokenize(TEXTS[0]))
    status, text = served.server.post(
        "/v2/models/embed/generate", {"text_input": "a", "max_tokens": 4}
    )
    assert status == 400
    assert "INVALID_ARG parameters.max_tokens: is for models that generate" in text
    status, text = served.server.post("/v2/models/llm/generate", asked)
    assert status == 400
    assert "INVALID_ARG embedding_request: is not supported" in text
    with pytest.raises(InvalidArgument, match="truncate_prompt_tokens"):
        client.embed("a " * 300)
    assert client.embed("a " * 300, truncate_prompt_tokens=-1).usage.prompt_tokens == 256


def test_progress_tells_which_model(served: Served) -> None:
    lines = served.server.log.splitlines()
    for phase in ("llm weights", "embed weights", "llm warm-up", "embed warm-up"):
        assert sum(line.split()[:2] == phase.split() for line in lines) == 1, phase
    assert any(line.startswith("  embed device=cpu dtype=float32 pooling=mean") for line in lines)


def stub_of(server: RunningServer, model: str) -> int:
    """The process that runs ``model``."""
    serve = server._serve
    (pid,) = [
        pid
        for pid in serve.children(serve.server())
        if f"/models/{model}/" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    return pid


def test_a_model_whose_process_is_killed_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    write_tiny_encoder(folder)
    with RunningServer(
        tmp_path, f"--model={tiny_model}", "--dtype=float32", "--num-blocks=40",
        "--no-self-check", f"--embedding-model={folder}",
    ) as server, server.client(model="embed", retries=0) as client:  # fmt: skip
        expected = client.embed("one two three").vector
        os.kill(stub_of(server, "embed"), signal.SIGKILL)
        wait_for(lambda: "ready again after" in server.log, "the server is restarted")
        # The server itself may break when one of its processes is killed.
        told = ("the process that runs the model has died", "the server ended by itself")
        assert any(text in server.log for text in told)

        def same() -> bool:
            try:
                return bool(np.allclose(client.embed("one two three").vector, expected, atol=1e-6))
            except TridentError:  # the connection to the server that was
                return False

        wait_for(same, "it embeds as before")


def test_a_model_that_cannot_embed_is_one_sentence(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    write_tiny_encoder(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    arguments = (f"--model={tiny_model}", "--dtype=float32", "--num-blocks=40", "--no-self-check")
    with Serve(tmp_path, *arguments, f"--embedding-model={folder}") as serve:
        assert serve.wait_for_end() == 1
        last = serve.err.splitlines()[-1]
        assert last.startswith("error: embed: ") and weights.name in last
        assert "Traceback" not in serve.err
        assert serve.left_behind() == []
    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    with Serve(tmp_path, *arguments, f"--embedding-model={folder}") as serve:
        assert serve.wait_for_end() == 1
        assert 'set "pooling" to "mean", "cls" or "last"' in serve.err
