"""The blocking client against the scripted server: what reaches it, and what comes back."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from trident_client import (
    TLS,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ServerError,
    StreamInterrupted,
    Unavailable,
    UnsupportedFeature,
    Usage,
    request_id,
)

from .conftest import QUICK
from .fake_server import (
    EMBED_INPUTS,
    VLLM_INPUTS,
    WAIT,
    FakeServer,
    Request,
    embedding,
    forever,
    hello,
    message,
)


def test_a_request_as_it_arrives(server: FakeServer, client: Client) -> None:
    result = client.generate("Hi ✓", temperature=0.5, seed=None, timeout=30)
    (request,) = server.requests
    assert request.inputs["text_input"] == "Hi ✓"
    assert request.inputs["stream"] is False
    assert request.inputs["exclude_input_in_output"] is True
    assert request.sampling == {"temperature": 0.5}
    assert request.proto.id == result.request_id != ""
    assert request.proto.parameters["triton_enable_empty_final_response"].bool_param
    assert 0 < request.proto.parameters["timeout"].int64_param <= 30_000_000
    assert request.seconds_left is not None
    assert 25 < request.seconds_left < 31  # gRPC rounds up
    assert "triton_grpc_error" not in request.headers
    assert not request.cancelled()


def test_a_result(client: Client) -> None:
    result = client.generate([1, 2])
    assert (result.text, result.token_ids, result.finish_reason) == (
        "Hello there",
        (10, 11, 12),
        "stop",
    )
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)
    assert result.usage.cached_tokens == 4


def test_a_stream_read_to_its_end_is_not_cancelled(server: FakeServer, client: Client) -> None:
    stream = client.stream("Hi")
    assert [delta.text for delta in stream] == ["Hel", "lo th", "ere"]
    assert stream.result().token_ids == (10, 11, 12)
    assert not server.one().cancelled()


def test_result_takes_the_rest_of_a_stream(client: Client) -> None:
    with client.stream("Hi") as stream:
        assert next(stream).text == "Hel"
        assert stream.result().text == "Hello there"
        assert stream.result().text == "Hello there"
        with pytest.raises(StopIteration):
            next(stream)


def test_leaving_the_with_cancels_on_the_server(server: FakeServer, client: Client) -> None:
    server.script = forever
    with client.stream("Hi") as stream:
        assert next(stream).text == "first"
        request = server.one()
        assert not request.ended.is_set()
    assert request.cancelled()
    with pytest.raises(Cancelled):
        next(stream)


def test_what_was_used_until_a_cancel_is_known(server: FakeServer, client: Client) -> None:
    with client.stream("Hi") as stream:
        assert stream.usage.prompt_tokens is None
        next(iter(stream))
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (5, 1)


def test_a_thread_may_name_its_requests(server: FakeServer, client: Client) -> None:
    token = request_id.set("order-17")
    client.generate("Hi")
    request_id.reset(token)
    client.generate("Hi")
    named, other = [request.proto.id for request in server.requests]
    assert named == "order-17" != other


def test_leaving_the_for_cancels_on_the_server(server: FakeServer, client: Client) -> None:
    server.script = forever
    stream = client.stream("Hi")
    for delta in stream:
        assert delta.text == "first"
        break
    assert server.one().cancelled()
    with pytest.raises(Cancelled):
        stream.result()


def test_an_exception_in_the_for_cancels_on_the_server(server: FakeServer, client: Client) -> None:
    server.script = forever

    def read() -> None:
        for _ in client.stream("Hi"):
            raise KeyError("the caller's")

    with pytest.raises(KeyError):
        read()
    assert server.one().cancelled()


def test_a_stream_that_is_dropped_unread_is_cancelled(server: FakeServer, client: Client) -> None:
    server.script = forever
    stream = client.stream("Hi")
    request = server.one()
    del stream
    gc.collect()
    assert request.cancelled()


def test_one_cancel_never_touches_another(server: FakeServer, client: Client) -> None:
    go_on = threading.Event()

    def script(request: Request) -> Iterator[Any]:
        yield message(text_output=[f"{request.inputs['text_input']}1"])
        if request.inputs["text_input"] == "stay":
            assert go_on.wait(WAIT)
            yield message(text_output=[" stay2"], final=True)
        else:
            request.ended.wait(WAIT)

    server.script = script
    with client.stream("stay") as stays, client.stream("leave") as leaves:
        next(stays), next(leaves)
        by_text = {request.inputs["text_input"]: request for request in server.requests}
        leaves.cancel()
        assert by_text["leave"].cancelled()
        assert not by_text["stay"].ended.is_set()
        go_on.set()
        assert stays.result().text == "stay1 stay2"
    assert not by_text["stay"].cancelled()


def test_cancel_from_another_thread_wakes_the_reader(server: FakeServer, client: Client) -> None:
    server.script = forever
    stream = client.stream("Hi")
    assert next(stream).text == "first"
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, stream)
        stream.cancel()
        assert isinstance(reading.exception(WAIT), Cancelled)
    assert server.one().cancelled()


def test_close_cancels_what_is_under_way(server: FakeServer, client: Client) -> None:
    server.script = forever
    stream = client.stream("Hi")
    next(stream)
    client.close()
    client.close()
    with pytest.raises(Cancelled):
        next(stream)
    assert server.one().cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("Hi")


def test_the_deadline_ends_the_request_on_both_sides(server: FakeServer, client: Client) -> None:
    server.script = forever
    client.metadata()
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s") as caught:
        client.stream("Hi", timeout=0.2).result()
    request = server.one()
    assert request.cancelled()
    assert caught.value.request_id == request.proto.id


def test_the_client_s_timeout_is_the_default(server: FakeServer) -> None:
    with Client(server.url, timeout=30) as client:
        client.generate("Hi")
        client.generate("Hi", timeout=10)
    limits = [request.proto.parameters["timeout"].int64_param for request in server.requests]
    assert 10_000_000 < limits[0] <= 30_000_000
    assert 0 < limits[1] <= 10_000_000


def test_an_error_in_the_stream(server: FakeServer, client: Client) -> None:
    text = "INVALID_ARG sampling_parameters.top_p: must be in (0, 1]"
    server.script = lambda request: iter([message(error=text, final=True)])
    with pytest.raises(InvalidArgument) as caught:
        client.generate("Hi", top_p=7)
    assert (str(caught.value), caught.value.code, caught.value.field) == (
        text,
        "INVALID_ARG",
        "sampling_parameters.top_p",
    )
    assert caught.value.request_id == server.requests[0].proto.id
    assert len(server.requests) == 1


def test_an_error_as_a_status(server: FakeServer, client: Client) -> None:
    def script(request: Request) -> Iterator[Any]:
        yield message(text_output=["a"])
        request.context.abort(grpc.StatusCode.INTERNAL, "INTERNAL engine: a fault")

    server.script = script
    stream = client.stream("Hi")
    assert next(stream).text == "a"
    for _ in range(2):  # it stays that request's error
        with pytest.raises(ServerError, match="a fault") as caught:
            next(stream)
        assert caught.value.field == "engine"


def test_a_cut_output_never_passes_for_whole(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter([message(text_output=["Hel"])])
    with pytest.raises(StreamInterrupted):
        client.generate("Hi")
    stream = client.stream("Hi")
    assert next(stream).text == "Hel"
    with pytest.raises(StreamInterrupted):
        stream.result()
    assert len(server.requests) == 2


def test_a_lone_final_mark_ends_the_stream(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter([message(text_output=["Hel"]), message(final=True)])
    assert [delta.text for delta in client.stream("Hi")] == ["Hel"]


@pytest.mark.parametrize("as_status", [False, True])
def test_unavailable_twice_then_well(server: FakeServer, client: Client, as_status: bool) -> None:
    def script(request: Request) -> Iterator[Any]:
        if len(server.requests) <= 2:
            if as_status:
                request.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield message(error="UNAVAILABLE queue: full", final=True)
        else:
            yield from hello(request)

    server.script = script
    assert client.generate("Hi").text == "Hello there"
    assert len(server.requests) == 3
    assert len({request.proto.id for request in server.requests}) == 1


def test_retries_end(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter([message(error="UNAVAILABLE queue: full", final=True)])
    with pytest.raises(Unavailable) as caught:
        client.generate("Hi")
    assert caught.value.field == "queue"
    assert len(server.requests) == 1 + QUICK.limit


def test_no_retry_after_the_first_token(server: FakeServer, client: Client) -> None:
    def script(request: Request) -> Iterator[Any]:
        yield message(text_output=["a"])
        yield message(error="UNAVAILABLE engine: stopping", final=True)

    server.script = script
    with pytest.raises(Unavailable):
        client.stream("Hi").result()
    assert len(server.requests) == 1


def test_no_retry_of_other_errors(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter([message(error="INTERNAL engine: a fault", final=True)])
    with pytest.raises(ServerError):
        client.generate("Hi")
    assert len(server.requests) == 1


def test_a_server_that_goes_away(server: FakeServer, client: Client) -> None:
    server.script = forever
    stream = client.stream("Hi")
    next(stream)
    server.stop()
    with pytest.raises(StreamInterrupted):
        next(stream)
    with pytest.raises(ConnectionFailed, match=server.url):
        client.generate("Hi")
    assert not client.is_live()
    assert not client.is_ready()


def test_metadata_is_fetched_once_and_retried(server: FakeServer, client: Client) -> None:
    server.metadata_failures = [(grpc.StatusCode.UNAVAILABLE, "Socket closed")]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client.generate, ["Hi"] * 16))
    assert server.metadata_calls == 2
    assert client.metadata().versions == ("1",)
    assert server.metadata_calls == 3


def test_an_unknown_model(server: FakeServer) -> None:
    with Client(server.url, "nope") as client:
        with pytest.raises(NotFound, match="nope"):
            client.generate("Hi")
        assert client.is_live()
        assert not client.is_ready()


def test_what_goes_with_any_request(server: FakeServer, client: Client) -> None:
    client.generate(["Hi", "Ho"], cache_salt="a", return_perf_metrics=True)
    client.stream("Hi", cache_salt="a", return_perf_metrics=True).result()
    client.chat([], cache_salt="a", return_perf_metrics=True)
    client.chat([], stream=True, cache_salt="a", return_perf_metrics=True).result()
    assert len(server.requests) == 5
    for request in server.requests:
        assert request.inputs["cache_salt"] == "a"
        assert request.inputs["return_perf_metrics"] is True
        assert request.sampling == {}


def test_an_unmodified_vllm_backend(server: FakeServer, client: Client) -> None:
    server.inputs = dict(VLLM_INPUTS)
    assert client.generate("Hi", max_tokens=3).text == "Hello there"
    assert "".join(delta.text for delta in client.stream("Hi")) == "Hello there"
    for request in server.requests:
        assert set(request.inputs) <= set(VLLM_INPUTS)
        assert request.headers["triton_grpc_error"] == "true"
    for call in (
        lambda: client.generate([1, 2]),
        lambda: client.chat([]),
        lambda: client.tokenize("Hi"),
        lambda: client.detokenize([1]),
        lambda: client.stats(),
    ):
        with pytest.raises(UnsupportedFeature):
            call()
    assert len(server.requests) == 2


def test_several_prompts_run_at_the_same_time_in_order(server: FakeServer, client: Client) -> None:
    together = threading.Barrier(4)

    def script(request: Request) -> Iterator[Any]:
        together.wait(WAIT)  # passes only once all four are here
        yield message(text_output=[request.inputs["text_input"].upper()], final=True)

    server.script = script
    results = client.generate(["a", "b", "c", "d"])
    assert [result.text for result in results] == ["A", "B", "C", "D"]
    assert len({request.proto.id for request in server.requests}) == 4


def test_of_several_prompts_a_failing_one_cancels_the_others(
    server: FakeServer, client: Client
) -> None:
    others = threading.Barrier(3)

    def script(request: Request) -> Iterator[Any]:
        others.wait(WAIT)
        if request.inputs["text_input"] == "bad":
            yield message(error="INVALID_ARG text_input: bad", final=True)
        else:
            request.ended.wait(WAIT)

    server.script = script
    with pytest.raises(InvalidArgument):
        client.generate(["a", "bad", "c"])
    fine = [request for request in server.requests if request.inputs["text_input"] != "bad"]
    assert all(request.cancelled() for request in fine)


def test_no_more_prompts_at_a_time_than_asked(server: FakeServer) -> None:
    lock = threading.Lock()
    running: list[int] = [0, 0]  # now, at most

    def script(request: Request) -> Iterator[Any]:
        with lock:
            running[0] += 1
            running[1] = max(running)
        yield message(text_output=["a"])
        with lock:
            running[0] -= 1
        yield message(final=True)

    server.script = script
    with Client(server.url, concurrency=2) as client:
        assert len(client.generate(["a"] * 12)) == 12
    assert running[1] <= 2


def test_n_sequences(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter(
        [
            message(text_output=["a", "x"], num_output_tokens=[1, 1]),
            message(text_output=["b", ""], num_output_tokens=[1, 0], final=True),
        ]
    )
    result = client.generate("Hi", n=2)
    assert [choice.text for choice in result.choices] == ["ab", "x"]
    assert result.usage.completion_tokens == 3
    assert "return_token_ids" not in server.requests[0].inputs


def test_unicode_both_ways(server: FakeServer, client: Client) -> None:
    text = "naïve 日本語 🎉\x00"
    server.script = lambda request: iter(
        [message(text_output=[request.inputs["text_input"]], final=True)]
    )
    assert client.generate(text).text == text
    with pytest.raises(InvalidArgument):
        client.generate("\ud83d")


def test_embed(server: FakeServer, client: Client) -> None:
    server.inputs = dict(EMBED_INPUTS)
    server.script = embedding
    assert client.embed("Hi").vector.tolist() == [2.0, 1.0, 0.5]
    result = client.embed(["Hello", "Ho", ""])
    assert result.vectors.tolist() == [[5.0, 1.0, 0.5], [2.0, 1.0, 0.5], [0.0, 1.0, 0.5]]
    assert result.vectors.dtype == np.float32
    assert result.usage == Usage(prompt_tokens=7)
    options: dict[str, Any] = {"dimensions": 2, "normalize": False, "truncate_prompt_tokens": 8}
    assert client.embed([[1, 2]], **options).vectors.shape == (1, 2)
    assert len(server.requests) == 5
    asked = json.loads(server.requests[-1].inputs["embedding_request"])
    assert asked == {"input": [1, 2], "pooling_params": {**options, "dimensions": [2]}}
    server.script = lambda request: iter(
        [message(embedding=[1.0] * len(request.inputs["embedding_request"]), final=True)]
    )
    with pytest.raises(ServerError, match="different lengths"):
        client.embed(["a", "abc"])


def test_embeddings_of_an_unmodified_vllm_backend(server: FakeServer, client: Client) -> None:
    server.inputs = dict(VLLM_INPUTS)
    server.script = lambda request: iter([message(text_output=["[0.5, 1.0]"], final=True)])
    result = client.embed("Hi")
    assert result.vector.tolist() == [0.5, 1.0]
    assert result.usage.prompt_tokens is None
    (request,) = server.requests
    assert set(request.inputs) == {"embedding_request", "text_input", "return_num_input_tokens"}


def test_control_operations(client: Client) -> None:
    assert client.detokenize(client.tokenize("Hi é")) == "Hi é"
    assert client.stats() == {"num_free_blocks": 7}


def test_chat_streams(server: FakeServer, client: Client) -> None:
    with client.chat([{"role": "user", "content": "Hi"}], stream=True, max_tokens=3) as stream:
        assert "".join(delta.text for delta in stream) == "Hello there"
    assert server.requests[0].sampling == {"max_tokens": 3}
    assert "chat" in server.requests[0].inputs


def test_headers_travel(server: FakeServer) -> None:
    with Client(server.url, headers={"Authorization": "Bearer x"}) as client:
        client.generate("Hi")
    assert server.requests[0].headers["authorization"] == "Bearer x"


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=llm.example", "-addext", "subjectAltName=DNS:llm.example",
         "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    pem = certificate.read_bytes()
    server = FakeServer(grpc.ssl_server_credentials([(key.read_bytes(), pem)]))
    named = TLS(root_certificates=pem, server_name="llm.example")
    misnamed = TLS(root_certificates=pem, server_name="other.example")
    with Client(server.url, ssl=named) as client:
        assert client.generate("Hi").text == "Hello there"
    for ssl in (misnamed, True, False):
        with Client(server.url, ssl=ssl, retries=0) as client, pytest.raises(ConnectionFailed):
            client.generate("Hi")
    server.stop()


def test_health(server: FakeServer, client: Client) -> None:
    assert client.is_live()
    assert client.is_ready()
    server.ready = False
    assert client.is_live()
    assert not client.is_ready()


def test_many_threads_share_a_client(server: FakeServer, client: Client) -> None:
    server.script = lambda request: iter(
        [
            message(text_output=[request.inputs["text_input"]]),
            message(text_output=["!"], final=True),
        ]
    )

    def work(number: int) -> bool:
        if number % 2:
            return client.generate(str(number)).text == f"{number}!"
        return "".join(delta.text for delta in client.stream(str(number))) == f"{number}!"

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(200)))


def test_it_works_inside_a_running_event_loop(client: Client) -> None:
    async def notebook_cell() -> str:
        return client.generate("Hi").text

    assert asyncio.run(notebook_cell()) == "Hello there"


def test_it_imports_no_engine_and_no_torch() -> None:
    code = "import sys, trident_client.cli; print({'torch', 'trident_llm'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
