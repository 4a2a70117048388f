"""A model that embeds as Triton calls it, in this process: real engine, fake server."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.cli.command import wait_for
from tests.model.embedding_models import MAX_LENGTH, write_tiny_encoder
from tests.serving.fake_triton import Sender, ServerMetrics, Tensor
from trident_llm.serving.embedding_model import TritonPythonModel
from trident_llm.serving.progress import ENVIRONMENT_VARIABLE


class Request:
    """What ``execute()`` gets."""

    def __init__(self, inputs: dict[str, Any], parameters: dict[str, Any] | None = None) -> None:
        self.sender = Sender()
        self._inputs = [Tensor(name, tensor(value)) for name, value in inputs.items()]
        self._parameters = parameters

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return "" if self._parameters is None else json.dumps(self._parameters)

    def request_id(self) -> str:
        return ""

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Sender:
        return self.sender


def tensor(value: Any) -> Any:
    if isinstance(value, (bool, np.ndarray)):
        return np.atleast_1d(value)
    if isinstance(value, list):
        return np.array(value, np.int32)
    text = value if isinstance(value, str) else json.dumps(value)
    return np.array([text.encode()], np.object_)


class Setup:
    def __init__(self, folder: Path, model: Path, **more: Any) -> None:
        version = folder / "embed" / "1"
        version.mkdir(parents=True)
        settings: dict[str, Any] = {
            "model": str(model),
            "num_threads": 1,
            "max_waiting": 8,
            "max_num_seqs": 4,
        }
        settings.update(more)
        (version / "model.json").write_text(json.dumps(settings))
        self.model = TritonPythonModel()
        config = {"model_transaction_policy": {"decoupled": True}, "parameters": {}}
        self.model.initialize(
            {
                "model_config": json.dumps(config), "model_repository": str(folder / "embed"),
                "model_version": "1", "model_name": "embed", "model_instance_name": "embed_0_0",
            }
        )  # fmt: skip

    def send(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> Request:
        request = Request(inputs, parameters)
        self.model.execute([request])
        return request

    def answer(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
        """The one response to a request."""
        request = self.send(parameters, **inputs)
        wait_for(lambda: request.sender.finals, "the request ends")
        (response,) = request.sender.responses
        return response

    def vector(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
        response = self.answer(parameters, **inputs)
        assert response.error is None, response.error.message
        return response["embedding"]

    def error(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> str:
        return str(self.answer(parameters, **inputs).error.message)

    def control(self, **operation: Any) -> Any:
        return json.loads(self.answer(control=operation)["control_output"][0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_encoder(folder)
    return folder


@pytest.fixture
def set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_metrics: object
) -> Iterator[Callable[..., Setup]]:
    """Makes a model of a folder and some settings."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "progress"))
    logger, interval = logging.getLogger("trident"), sys.getswitchinterval()
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    made: list[Setup] = []

    def make(folder: Path, **settings: Any) -> Setup:
        made.append(Setup(tmp_path, folder, **settings))
        return made[-1]

    yield make
    for setup in made:
        setup.model.finalize()
    sys.setswitchinterval(interval)


@pytest.fixture
def setup(set_up: Callable[..., Setup], folder: Path) -> Setup:
    return set_up(folder)


def test_all_ways_to_send_a_text_give_its_vector(setup: Setup) -> None:
    text = "The capital of France is Paris!"
    ids = setup.control(op="tokenize", text=text)["token_ids"]
    assert ids == [2, 4, 5, 6, 7, 8, 9, 14, 3]
    vector = setup.vector(text_input=text)
    assert vector.shape == (32,)
    assert np.linalg.norm(vector) == pytest.approx(1.0)
    for inputs in (
        {"input_ids": ids},
        {"embedding_request": {"input": text}, "return_embedding": True},
        {"embedding_request": {"input": ids}, "return_embedding": True},
    ):
        np.testing.assert_allclose(setup.vector(**inputs), vector, rtol=1e-5, atol=1e-6)
    answer = setup.answer(embedding_request={"input": text}, return_num_input_tokens=True)
    np.testing.assert_allclose(json.loads(answer["text_output"][0]), vector, rtol=1e-5, atol=1e-6)
    assert answer["num_input_tokens"].tolist() == [9]
    assert np.abs(setup.vector(text_input="two") - vector).max() > 0.01


def test_shorter_vectors(setup: Setup) -> None:
    whole = setup.vector(text_input="one two")
    short = setup.vector({"dimensions": 5}, text_input="one two")
    np.testing.assert_allclose(short, whole[:5] / np.linalg.norm(whole[:5]), rtol=1e-5)
    raw = setup.vector({"normalize": False}, text_input="one two")
    assert np.linalg.norm(raw) != pytest.approx(1.0, abs=1e-3)
    assert setup.error({"dimensions": 33}, text_input="a").startswith(
        "INVALID_ARG parameters.dimensions: must be at most 32"
    )


def test_long_texts_are_refused_or_cut_behind(setup: Setup) -> None:
    long = "one two " * 40
    assert setup.error(text_input=long) == (
        f"INVALID_ARG text_input: has 82 tokens; it must fit max_model_len, which is {MAX_LENGTH}: "
        "shorten it, or let it be cut with truncate_prompt_tokens"
    )
    assert setup.error(text_input="one " * 2000).startswith("INVALID_ARG text_input: is too long")
    assert setup.error(input_ids=[5] * 25).startswith("INVALID_ARG input_ids: has 25 tokens")
    kept = setup.vector(text_input="one two one")
    for given in (long, long * 1000):
        cut = setup.vector({"truncate_prompt_tokens": 5}, text_input=given)
        np.testing.assert_allclose(cut, kept, rtol=1e-5, atol=1e-6)
    most = setup.answer(
        {"truncate_prompt_tokens": -1}, text_input=long, return_num_input_tokens=True
    )
    assert most["num_input_tokens"].tolist() == [MAX_LENGTH]
    ids = setup.vector({"truncate_prompt_tokens": 2}, input_ids=[5, 6, 7])
    np.testing.assert_allclose(ids, setup.vector(input_ids=[5, 6]), rtol=1e-5, atol=1e-6)


def test_ids_outside_the_vocabulary_and_no_ids(setup: Setup) -> None:
    assert setup.error(input_ids=[18]) == "INVALID_ARG input_ids: must hold ids from 0 to 17"
    assert setup.error(embedding_request={"input": []}).startswith(
        "INVALID_ARG embedding_request.input: is empty"
    )
    for more in ({}, {"pooling_params": {"truncate_prompt_tokens": -1}}):
        assert setup.error(embedding_request={"input": "half \ud83d", **more}).startswith(
            "INVALID_ARG embedding_request.input: the text holds a lone surrogate"
        )
    assert setup.vector(text_input="").shape == (32,)  # what is added around a text remains


class Held:
    """Holds up the model in its step until told to go on."""

    def __init__(self, setup: Setup) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        embedder = setup.model._engine._embedder
        embed = embedder.embed

        def hold(texts: Any) -> Any:
            self.began.set()
            assert self.goes_on.wait(60)
            return embed(texts)

        embedder.embed = hold  # type: ignore[method-assign]


def test_queue_cancel_and_overload(setup: Setup, server_metrics: ServerMetrics) -> None:
    held = Held(setup)
    first = setup.send(text_input="one")
    assert held.began.wait(30)
    waiting: list[Request] = []
    intake = setup.model._intake
    while len(waiting) < 8:  # each on its own: a request that is being handed over counts twice
        waiting.append(setup.send(text_input="two"))
        wait_for(lambda: intake.num_waiting == 0, "it is handed over")
    assert setup.model._count_waiting() == 8
    refused = setup.send(text_input="three")
    wait_for(lambda: refused.sender.finals, "it is refused at once")
    assert refused.sender.responses[0].error.message.startswith("UNAVAILABLE queue: is full: 8")  # type: ignore[union-attr]
    cancelled = waiting[3]
    cancelled.sender.cancelled = True
    handles = list(setup.model._responder._active.values())
    (handle,) = [each for each in handles if each.sender is cancelled.sender]
    wait_for(lambda: handle.abort_error is not None, "the cancel is seen")
    held.goes_on.set()
    wait_for(lambda: all(r.sender.finals for r in (first, *waiting)), "all end")
    for request in (first, *waiting):
        (response,) = request.sender.responses
        if request is cancelled:
            assert response.error is not None
            assert response.error.message.startswith("CANCELLED request: ")
        else:
            assert response.error is None
    assert server_metrics["vllm:num_requests_waiting"].value == 0
    assert server_metrics.labelled("vllm:request_success_total", finished_reason="stop").value == 8
    assert server_metrics.labelled("trident:request_errors_total", code="CANCELLED").value == 1
    assert server_metrics["vllm:prompt_tokens_total"].value == 8 * 3
    assert not any("kv" in name or "generation" in name for name in server_metrics.metrics)


def test_faults(setup: Setup, server_metrics: ServerMetrics) -> None:
    embedder = setup.model._engine._embedder
    embed = embedder.embed

    def broken(texts: Any) -> Any:
        raise RuntimeError("the device is gone")

    embedder.embed = broken  # type: ignore[method-assign]
    assert setup.error(text_input="one").startswith("INTERNAL engine: a step failed")
    embedder.embed = embed  # type: ignore[method-assign]
    assert setup.vector(text_input="one").shape == (32,)
    embedder.embed = broken  # type: ignore[method-assign]
    for _ in range(3):
        assert setup.model.is_ready()
        assert setup.error(text_input="one").startswith("INTERNAL ")
    wait_for(lambda: not setup.model.is_ready(), "it is not ready")
    assert setup.error(text_input="one").startswith("UNAVAILABLE engine: has failed")
    assert server_metrics["trident:engine_healthy"].value == 0.0


def test_stats(setup: Setup) -> None:
    setup.vector(text_input="one")
    stats = setup.control(op="stats")
    assert stats["num_dimensions"] == 32
    assert stats["max_model_len"] == MAX_LENGTH
    assert stats["num_requests"] == stats["integrity_failures"] == 0
    assert stats["num_open_requests"] == 1


def test_a_decoder_embeds_by_its_last_token(set_up: Callable[..., Setup], tiny_model: Path) -> None:
    """The same folder that generates; its files do not say how it pools, so the settings do."""
    setup = set_up(tiny_model, pooling="last", max_model_len=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).model
    for text in ("hello", "one two three four"):
        ids = setup.control(op="tokenize", text=text)["token_ids"]
        with torch.no_grad():
            last = model(torch.tensor([ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0).numpy()
        np.testing.assert_allclose(setup.vector(text_input=text), expected, rtol=1e-3, atol=1e-4)
    assert setup.error(input_ids=[1] * 65).startswith("INVALID_ARG input_ids: has 65 tokens")
