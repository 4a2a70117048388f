"""Requests as users of vllm_backend send them, with the stock tritonclient."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as stock

Results = list[tuple[Any, Any]]


def make_inputs(
    text: str, sampling: Mapping[str, Any] | None = None, **others: bool | str | None
) -> list[Any]:
    """Tensors of a request; what is None is not sent."""
    inputs = [_tensor("text_input", np.array([text.encode()], np.object_))]
    if sampling is not None:
        encoded = json.dumps(sampling).encode()
        inputs.append(_tensor("sampling_parameters", np.array([encoded], np.object_)))
    for name, value in others.items():
        if isinstance(value, str):
            inputs.append(_tensor(name, np.array([value.encode()], np.object_)))
        elif value is not None:
            inputs.append(_tensor(name, np.array([value], bool)))
    return inputs


def _tensor(name: str, array: Any) -> Any:
    made = stock.InferInput(name, list(array.shape), "BOOL" if array.dtype == bool else "BYTES")
    made.set_data_from_numpy(array)
    return made


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def strings(result: Any, name: str) -> list[str]:
    return [item.decode() for item in result.as_numpy(name)]


class Stream:
    """The stock client's stream; everything that its callback gets is kept."""

    def __init__(self, port: int) -> None:
        self.results: Results = []
        self._news = threading.Condition()
        self._client = stock.InferenceServerClient(f"localhost:{port}")
        self._client.start_stream(self._callback)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        # Not cancelled when all went well: a cancel after the last response leaves the request behind
        # in the front end of older servers, which then cannot unload the model.
        self._client.stop_stream(cancel_requests=error is not None)
        self._client.close()

    def _callback(self, result: Any, error: Any) -> None:
        with self._news:
            self.results.append((result, error))
            self._news.notify_all()

    def send(self, model: str, inputs: list[Any], **options: Any) -> None:
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def wait_for(self, count: int, seconds: float = 60.0) -> Results:
        """The first results until ``count`` requests have ended, by a final response or an error."""

        def num_ended() -> int:
            return sum(error is not None or is_final(result) for result, error in self.results)

        with self._news:
            assert self._news.wait_for(lambda: num_ended() >= count, seconds), self.results
            return list(self.results)


def run(port: int, inputs: list[Any], model: str = "llm", **options: Any) -> list[Any]:
    """The responses to one request; fails if it ends with an error."""
    with Stream(port) as stream:
        stream.send(model, inputs, **options)
        results = stream.wait_for(1)
    assert [error for _, error in results] == [None] * len(results)
    return [result for result, _ in results]


def error_of(port: int, inputs: list[Any], model: str = "llm", **options: Any) -> str:
    """The text of the error that one request ends with, its only response."""
    with Stream(port) as stream:
        stream.send(model, inputs, **options)
        ((_, error),) = stream.wait_for(1)
    assert error is not None
    return str(error.message())
