"""The model as Triton calls it, in this process: real engine, fake server."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.command import wait_for
from tests.serving.fake_triton import Sender, ServerMetrics, Tensor, texts
from trident_llm.serving.model import TritonPythonModel
from trident_llm.serving.progress import ENVIRONMENT_VARIABLE

MAX_MODEL_LEN = 64


class Request:
    """What ``execute()`` gets."""

    def __init__(self, text: str, sampling: dict[str, Any], **flags: bool) -> None:
        self.sender = Sender()
        self.caller_id = ""
        self._inputs = [
            Tensor("text_input", np.array([text.encode()], np.object_)),
            Tensor("sampling_parameters", np.array([json.dumps(sampling).encode()], np.object_)),
            *(Tensor(name, np.array([value])) for name, value in flags.items()),
        ]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return self.caller_id

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Sender:
        return self.sender


class Setup:
    def __init__(self, folder: Path, model: Path) -> None:
        version = folder / "llm" / "1"
        version.mkdir(parents=True)
        settings = {
            "model": str(model), "dtype": "float32", "num_blocks": 40, "num_threads": 1,
            "max_model_len": MAX_MODEL_LEN,
        }  # fmt: skip
        (version / "model.json").write_text(json.dumps(settings))
        self.progress = folder / "progress"
        self.model = TritonPythonModel()
        config = {"model_transaction_policy": {"decoupled": True}, "parameters": {}}
        self.model.initialize(
            {
                "model_config": json.dumps(config), "model_repository": str(folder / "llm"),
                "model_version": "1", "model_name": "llm", "model_instance_name": "llm_0_0",
            }
        )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.progress.read_text().splitlines()]

    def answer(self, text: str, sampling: dict[str, Any], **flags: bool) -> Any:
        """The one response to a request."""
        request = Request(text, {"temperature": 0, "ignore_eos": True, **sampling}, **flags)
        self.model.execute([request])
        wait_for(lambda: request.sender.finals, "the request ends")
        (response,) = request.sender.responses
        return response


@pytest.fixture
def setup(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, server_metrics: object
) -> Iterator[Setup]:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "progress"))
    logger, interval = logging.getLogger("trident"), sys.getswitchinterval()
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    made = Setup(tmp_path, tiny_model)
    yield made
    made.model.finalize()
    sys.setswitchinterval(interval)


def test_a_dead_engine_is_told_outside_of_any_phase(
    setup: Setup, server_metrics: ServerMetrics
) -> None:
    def broken(output: Any) -> Any:
        raise RuntimeError("the device is gone")

    assert texts(setup.answer("hello", {"max_tokens": 2}))[0].startswith("hello")
    loaded = setup.events()
    assert loaded[-1]["event"] == "end"
    setup.model._engine._executor.launch = broken  # type: ignore[method-assign]
    for _ in range(3):
        assert setup.model.is_ready()
        error = setup.answer("hello", {"max_tokens": 2}).error
        assert error.message.startswith("INTERNAL ")
    wait_for(lambda: len(setup.events()) > len(loaded), "the fault is told")
    assert setup.events()[len(loaded) :] == [
        {"event": "error", "model": "llm", "text": "the engine has failed and computes nothing"}
    ]
    assert not setup.model.is_ready()
    assert server_metrics["trident:engine_healthy"].value == 0.0
    later = setup.answer("hello", {"max_tokens": 2}).error
    assert later.message.startswith("UNAVAILABLE engine: has failed")


def test_the_log_names_requests_as_their_clients_do(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("trident").addHandler(caplog.handler)
    executor = setup.model._engine._executor
    launch = executor.launch

    def fail(*args: Any) -> Any:
        executor.launch = launch  # type: ignore[method-assign]
        raise RuntimeError("the device stumbled")

    executor.launch = fail  # type: ignore[method-assign]
    request = Request("hello", {"max_tokens": 2})
    request.caller_id = "order-17:a"
    setup.model.execute([request])
    wait_for(lambda: request.sender.finals, "the request ends")
    assert " (order-17:a) ended with INTERNAL engine: a step failed" in caplog.text


def test_a_prompt_is_truncated_to_its_end(setup: Setup) -> None:
    text = "one two three four five six seven eight nine ten eleven twelve"
    ids = setup.model._intake._encode_text(text)
    assert len(ids) > 8
    whole = setup.answer(text, {"max_tokens": 1}, return_num_input_tokens=True)
    assert whole["num_input_tokens"].tolist() == [len(ids)]
    sampling = {"max_tokens": 6, "truncate_prompt_tokens": 5}
    cut = setup.answer(text, sampling, return_token_ids=True, return_num_input_tokens=True)
    assert cut["num_input_tokens"].tolist() == [5]
    kept = setup.model._intake._token_text
    tail = setup.answer(
        "".join(kept(token_id).text for token_id in ids[-5:]),
        {"max_tokens": 6},
        return_token_ids=True,
    )
    assert cut["token_ids"].tolist() == tail["token_ids"].tolist()
    # What is too long as a whole fits once it is cut to what the model holds.
    longest = text * 10
    refused = setup.answer(longest, {"max_tokens": 1})
    assert refused.error.message.startswith("INVALID_ARG text_input: has ")
    fitted = setup.answer(
        longest, {"max_tokens": 1, "truncate_prompt_tokens": -1}, return_num_input_tokens=True
    )
    assert 0 < fitted["num_input_tokens"][0] < MAX_MODEL_LEN


def test_bad_words_are_words_of_the_models_tokenizer(setup: Setup) -> None:
    sampling = {"max_tokens": 6}
    free = setup.answer("hello", sampling, return_token_ids=True)["token_ids"].tolist()
    encode = setup.model._intake._facts.tokenizer.encode
    banned = next(
        word for word, _ in map(setup.model._intake._token_text, free)
        if encode(word, add_special_tokens=False) in [[token_id] for token_id in free]
    )  # fmt: skip
    (token_id,) = encode(banned, add_special_tokens=False)
    assert token_id in free
    bound = setup.answer("hello", {**sampling, "bad_words": [banned]}, return_token_ids=True)
    assert token_id not in bound["token_ids"].tolist()
    refused = setup.answer("hello", {**sampling, "bad_words": [""]})
    assert refused.error.message.startswith("INVALID_ARG sampling_parameters.bad_words")
