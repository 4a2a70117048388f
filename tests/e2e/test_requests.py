"""What a user does with a running server: stream, cancel, err, unload, stop."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as stock

from tests.cli.command import wait_for
from tests.e2e.models import without_end
from tests.e2e.server import RunningServer
from tests.e2e.test_faults import failing_repository
from trident_client import Cancelled, InvalidArgument, Stream, TridentError, Unavailable

pytestmark = pytest.mark.e2e


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 480) for _ in range(rng.randint(1, 60))]


def test_64_streams_some_cancelled_the_others_get_their_text(tiny_server: RunningServer) -> None:
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8}
    # One that was left holds its place until that is noticed, so the queue may be full for a moment.
    with tiny_server.client(retries=100) as client:
        alone = {n: client.generate(prompt(n), seed=n, **sampling).text for n in range(64) if n % 3}
        texts: dict[int, str] = {}
        errors: list[TridentError] = []
        barrier = threading.Barrier(16)

        def run(worker: int) -> None:
            barrier.wait()
            for n in range(worker, 64, 16):
                try:
                    with client.stream(prompt(n), seed=n, **sampling) as stream:
                        if n % 3:
                            texts[n] = stream.result().text
                        else:
                            for read, _ in enumerate(stream):
                                if read == n % 5:
                                    break
                except TridentError as error:
                    errors.append(error)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert texts == alone
    tiny_server.idle_stats()


@pytest.fixture(scope="module")
def slow_server(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[RunningServer]:
    """At most 8 requests run and 16 wait, and those that run do so for a quarter of a minute."""
    folder = tmp_path_factory.mktemp("slow")
    limits = {"max_num_seqs": 8, "max_waiting": 16, "num_blocks": 400}
    (failing_repository(folder, tiny_model, **limits) / "slow").touch()
    with RunningServer(
        folder, f"--model-repository={folder / 'models'}", "--no-self-check"
    ) as server:
        yield server


LONG = {"max_tokens": 150, "ignore_eos": True}


def test_cancel_in_the_queue_in_prefill_and_in_decode(slow_server: RunningServer) -> None:
    with slow_server.client() as client:
        # 8 run, 12 wait; nobody reads, so only a poll can notice the cancels.
        streams = [client.stream(prompt(n), **LONG) for n in range(20)]
        wait_for(lambda: client.stats()["num_requests"] == 20, "all are in")
        for stream in streams:
            stream.cancel()
        slow_server.idle_stats()


def test_a_full_queue_refuses_and_says_so(slow_server: RunningServer) -> None:
    refused: list[Unavailable] = []
    with slow_server.client(retries=0) as client:
        streams = [client.stream(prompt(n), **LONG) for n in range(40)]

        def read(stream: Stream) -> None:
            try:
                stream.result()
            except Unavailable as error:
                refused.append(error)
            except Cancelled:
                pass

        threads = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        # One more or less: the door counts while the engine moves requests from the queue to the batch.
        wait_for(lambda: len(refused) >= 40 - 8 - 16 - 1, "what is too much is refused")
        for stream in streams:
            stream.cancel()
        for thread in threads:
            thread.join()
    assert abs(len(refused) - (40 - 8 - 16)) <= 1
    assert all("queue" in str(error) for error in refused)
    slow_server.idle_stats()


def test_generate_over_http(tiny_server: RunningServer) -> None:
    body = {"text_input": "hello", "parameters": {"max_tokens": 5, "temperature": 0}}
    status, text = tiny_server.post("/v2/models/llm/generate", body)
    assert status == 200
    answer = json.loads(text)
    assert answer["text_output"].startswith("hello")
    body = {
        "text_input": "hello", "stream": True, "return_finish_reason": True,
        "sampling_parameters": '{"max_tokens": 5, "temperature": 0, "ignore_eos": true}',
    }  # fmt: skip
    status, text = tiny_server.post("/v2/models/llm/generate_stream", body)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    # Steps of so small a model outrun the sending now and then: then deltas come merged.
    reasons = [event["finish_reason"] for event in events]
    assert reasons == ["None"] * (len(events) - 1) + ["length"]
    assert "hello" + "".join(event["text_output"] for event in events) == answer["text_output"]


def test_chat_is_rendered_with_the_models_template(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        chat = client.chat(
            [{"role": "user", "content": "hello"}], max_tokens=6, temperature=0, ignore_eos=True
        )
        raw = client.generate(
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
            max_tokens=6, temperature=0, ignore_eos=True,
        )  # fmt: skip
        assert chat.token_ids == raw.token_ids
        forged = client.tokenize("<|im_end|>")
        assert len(forged) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text_input": ""}, "text_input"),
        ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": "[]"}, "sampling_parameters"),
        ({"text_input": "x", "sampling_parameters": '{"temperature": "hot"}'}, "temperature"),
        ({"text_input": "x", "sampling_parameters": '{"max_tokens": 100000}'}, "max_tokens"),
        ({"text_input": "x", "sampling_parameters": '{"nonsense": 1}'}, "sampling_parameters"),
        ({"text_input": "x" * 20000}, "text_input"),
        ({"input_ids": [100000]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text_input": "x", "input_ids": [1]}, "text_input"),
        ({}, "text_input"),
        ({"chat": "{"}, "chat"),
        ({"chat": '{"messages": []}'}, "chat.messages"),
        ({"chat": '[{"role": 5, "content": "x"}]'}, "chat"),
        ({"control": '{"op": "reboot"}'}, "control.op"),
        ({"text_input": "x", "image": ["x"]}, "image"),
        ({"text_input": "x", "embedding_request": "x"}, "embedding_request"),
    ],
    ids=str,
)
def test_bad_input_is_refused_by_name_and_nobody_else_notices(
    tiny_server: RunningServer, body: dict[str, Any], field: str
) -> None:
    control = {"text_input": "hello", "parameters": {"max_tokens": 4, "temperature": 0}}
    before = tiny_server.post("/v2/models/llm/generate", control)
    status, text = tiny_server.post("/v2/models/llm/generate", body)
    # Triton's HTTP front end fixes the status when the first response comes, an error included.
    assert status in (200, 400)
    error = json.loads(text)["error"]
    assert "INVALID_ARG" in error
    assert field in error
    assert tiny_server.post("/v2/models/llm/generate", control) == before


def test_typed_errors_reach_the_client(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client, pytest.raises(InvalidArgument) as caught:
        client.generate("x", temperature=-1)
    assert caught.value.field == "sampling_parameters.temperature"


def test_the_stock_client_streams_with_vllm_backends_tensors(tiny_server: RunningServer) -> None:
    inputs = [
        stock.InferInput("text_input", [1], "BYTES"),
        stock.InferInput("stream", [1], "BOOL"),
        stock.InferInput("sampling_parameters", [1], "BYTES"),
        stock.InferInput("exclude_input_in_output", [1], "BOOL"),
    ]
    inputs[0].set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
    inputs[1].set_data_from_numpy(np.array([True]))
    inputs[2].set_data_from_numpy(
        np.array([b'{"max_tokens": "200", "temperature": "0", "ignore_eos": "true"}'], np.object_)
    )
    inputs[3].set_data_from_numpy(np.array([True]))
    results: list[Any] = []
    done = threading.Event()

    def callback(result: Any, error: Any) -> None:
        results.append((result, error))
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            done.set()

    with stock.InferenceServerClient(f"localhost:{tiny_server.grpc_port}") as client:
        client.start_stream(callback)
        client.async_stream_infer("llm", inputs, enable_empty_final_response=True)
        assert done.wait(60)
        client.stop_stream()
    assert [error for _, error in results] == [None] * len(results)
    assert len(results) > 1
    text = b"".join(result.as_numpy("text_output")[0] for result, _ in results).decode()
    with tiny_server.client() as client:
        assert text == client.generate("hello", max_tokens=200, temperature=0, ignore_eos=True).text


def test_n_sequences_arrive_by_index(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        result = client.generate(
            "hello", n=3, max_tokens=6, seed=5, temperature=1.5, ignore_eos=True
        )
        assert [choice.index for choice in result.choices] == [0, 1, 2]
        assert len({choice.text for choice in result.choices}) > 1
        streamed = client.stream(
            "hello", n=3, max_tokens=6, seed=5, temperature=1.5, ignore_eos=True
        ).result()
        assert [c.text for c in streamed.choices] == [c.text for c in result.choices]


def test_stop_strings_never_show_in_a_stream(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        sampling = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        free = client.stream("hello", **sampling).result().text
        stop = free[5:9]
        stream = client.stream("hello", stop=[stop], **sampling)
        shown = "".join(delta.text for delta in stream)
        assert shown == free[: free.index(stop)]


def test_control_operations(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        ids = client.tokenize("hello there")
        assert client.detokenize(ids) == "hello there"
        stats = client.stats()
        assert stats["num_blocks"] == 399


def test_unload_under_load_and_reload(tiny_server: RunningServer) -> None:
    with stock.InferenceServerClient(f"localhost:{tiny_server.grpc_port}") as control:
        with tiny_server.client(retries=0) as client:
            streams = [client.stream(prompt(n), max_tokens=60, ignore_eos=True) for n in range(6)]
            for stream in streams:
                next(stream)
            control.unload_model("llm")
            # What was accepted is finished before the model goes.
            for stream in streams:
                assert stream.result().finish_reason == "length"
        wait_for(lambda: not control.is_model_ready("llm"), "the model is gone")
        states = [m.state for m in control.get_model_repository_index().models if m.name == "llm"]
        wait_for(
            lambda: all(
                m.state == "UNAVAILABLE"
                for m in control.get_model_repository_index().models
                if m.name == "llm"
            ),
            f"finalize ran ({states})",
        )
        control.load_model("llm")
        assert control.is_model_ready("llm")
    with tiny_server.client() as client:
        assert len(client.generate("hello", max_tokens=4, ignore_eos=True).text) > 0
    tiny_server.idle_stats()


def test_another_version_of_the_settings_is_loaded_under_load(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Triton's override of files: those in flight end where they began, new ones come to the new."""
    with RunningServer(
        tmp_path, f"--model={without_end(tiny_model, tmp_path / 'model')}", "--dtype=float32",
        "--model-control-mode=explicit", "--no-self-check", "--num-blocks=2000",
    ) as server:  # fmt: skip
        (folder,) = tmp_path.glob("trident-*/models/llm")
        settings = json.loads((folder / "1" / "model.json").read_text())
        files = {
            "file:1/model.json": json.dumps({**settings, "num_blocks": 1000}).encode(),
            "file:1/model.py": (folder / "1" / "model.py").read_bytes(),
        }
        with (
            stock.InferenceServerClient(f"localhost:{server.grpc_port}") as control,
            server.client(retries=0) as client,
        ):
            short = [client.stream("hello", max_tokens=300, ignore_eos=True) for _ in range(4)]
            streams = [client.stream("hello", max_tokens=20_000, ignore_eos=True) for _ in range(2)]
            for stream in short + streams:
                next(stream)
            config = control.get_model_config("llm", as_json=True)["config"]
            # Triton looks at the files again only if something of the configuration differs.
            config.setdefault("parameters", {})["edition"] = {"string_value": "2"}
            control.load_model("llm", config=json.dumps(config), files=files)
            assert client.stats()["num_blocks"] == 999
            assert len(client.generate("hello", max_tokens=4, ignore_eos=True).token_ids or ()) == 4
            for stream in short:
                assert stream.result().finish_reason == "length"
            for stream in streams:
                stream.cancel()
            control.load_model("llm")  # from the folder again
            assert client.stats()["num_blocks"] == 1999
        server.idle_stats()
