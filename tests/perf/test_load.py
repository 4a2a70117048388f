"""The load tools and the benchmark's own clients on a real server."""

from __future__ import annotations

import asyncio
import json
import queue

import numpy as np
import pytest
import tritonclient.grpc as stock

from perf import analyzer, serving, tools
from perf.analyzer import Load, Shape
from perf.workloads import RequestSpec
from tests.e2e.server import RunningServer
from tests.openai.running import RunningGateway
from tests.perf.mixed_run import SPECS, check

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tool() -> tools.Tool:
    try:
        return tools.fetch_perf_analyzer()
    except tools.ToolUnavailableError as error:
        pytest.skip(f"perf_analyzer cannot be fetched: {error}")


@pytest.mark.parametrize(
    "load", [Load("concurrency", 1), Load("concurrency", 4), Load("request_rate", 8)]
)
def test_perf_analyzer_runs_to_its_end(
    tiny_server: RunningServer, tool: tools.Tool, load: Load
) -> None:
    shape = Shape(requests=6, words=8, output_tokens=32)
    url = f"localhost:{tiny_server.grpc_port}"
    experiment = analyzer.run_level(tool, url, "llm", load, shape)
    assert (experiment.mode, experiment.level) == (load.mode, load.level)
    assert len(experiment.traces) >= 6
    for trace in experiment.traces:
        assert len(trace.responses) > 1
        assert trace.output_tokens == 32
        assert trace.prompt_tokens > 8
    tiny_server.idle_stats()


def test_a_level_that_fails_tells_what_perf_analyzer_said(
    tiny_server: RunningServer, tool: tools.Tool
) -> None:
    shape = Shape(requests=1, words=8, output_tokens=100_000)
    with pytest.raises(RuntimeError, match=r"(?s)concurrency=1:.*INVALID_ARG"):
        analyzer.run_level(
            tool, f"localhost:{tiny_server.grpc_port}", "llm", Load("concurrency", 1), shape
        )


def test_grpc(tiny_server: RunningServer) -> None:
    check(*asyncio.run(serving.run_grpc(SPECS, f"localhost:{tiny_server.grpc_port}")))


def test_http(tiny_server: RunningServer) -> None:
    url = tiny_server.url("").removeprefix("http://")
    check(*asyncio.run(serving.run_http(SPECS, url)))
    with pytest.raises(RuntimeError, match="INVALID_ARG"):
        asyncio.run(serving.run_http([RequestSpec((5,), 100_000)], url))


def test_gateway(tiny_server: RunningServer) -> None:
    with RunningGateway(f"localhost:{tiny_server.grpc_port}") as gateway:
        url = gateway.url.removeprefix("http://")
        check(*asyncio.run(serving.run_gateway(SPECS, url)))
        with pytest.raises(RuntimeError, match="max_tokens"):
            asyncio.run(serving.run_gateway([RequestSpec((5,), 100_000)], url))


def tensor(name: str, values: list[object], datatype: str) -> stock.InferInput:
    array = np.array(values, dtype=bool if datatype == "BOOL" else object)
    given = stock.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


@pytest.mark.parametrize("extra", [{}, {"ignore_eos": "true"}])
def test_the_payload_of_genai_perf(tiny_server: RunningServer, extra: dict[str, str]) -> None:
    """Numbers are strings; every configured output is requested; an empty final one is asked for."""
    # It relies on min_tokens for the output's length; ignore_eos comes only if it is told to send it.
    sampling = {"max_tokens": "32", "min_tokens": "32", **extra}
    arrived: queue.Queue[tuple[stock.InferResult | None, Exception | None]] = queue.Queue()
    with stock.InferenceServerClient(f"localhost:{tiny_server.grpc_port}") as client:
        outputs = client.get_model_metadata("llm", as_json=True)["outputs"]
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(
            "llm",
            [
                tensor("text_input", [b"heavy best friend honest gentleman"], "BYTES"),
                tensor("exclude_input_in_output", [True], "BOOL"),
                tensor("stream", [True], "BOOL"),
                tensor("return_num_output_tokens", [True], "BOOL"),  # an --extra-inputs
                tensor("sampling_parameters", [json.dumps(sampling).encode()], "BYTES"),
            ],
            outputs=[stock.InferRequestedOutput(output["name"]) for output in outputs],
            request_id="1",
            enable_empty_final_response=True,
        )
        texts, tokens = [], 0
        while True:
            result, error = arrived.get(timeout=30)
            assert error is None
            assert result is not None
            response = result.get_response()
            text, count = result.as_numpy("text_output"), result.as_numpy("num_output_tokens")
            # No response without a token, not at the end either: it would count as latency.
            assert text is not None and count is not None and count[0] > 0
            tokens += int(count[0])
            texts.append(text[0].decode())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert tokens == 32
    assert len(texts) > 1  # fewer than 32 where the reader is slow and waiting ones are merged
    tiny_server.idle_stats()
