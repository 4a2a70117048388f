"""What clients of vllm_backend rely on, checked as its own tests do, with the stock tritonclient."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as stock_aio

from tests.cli.command import wait_for
from tests.e2e.server import RunningServer
from tests.e2e.stock_client import Stream, error_of, make_inputs, run, strings
from tests.engine.harness import Harness, make_engine
from trident_client import DeadlineExceeded, Unavailable
from trident_llm.text.tokenizer import Tokenizer

pytestmark = pytest.mark.e2e

PROMPT = "In this example,"
FLAGS = (
    "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
    "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
GREEDY = {"temperature": "0", "ignore_eos": "true"}
NUM_TOKENS = 4
AT_ONCE = 16  # what the server lets wait
Combination = dict[str, Any]


def combinations() -> list[Combination]:
    """All 1458: streaming or not, three ``logprobs``, and each flag absent, true and false."""
    values = ((True, False), (None, 0, 2), *itertools.repeat((None, True, False), len(FLAGS)))
    names = ("stream", "logprobs", *FLAGS)
    return [dict(zip(names, chosen)) for chosen in itertools.product(*values)]


def inputs_of(combination: Combination, **sampling: Any) -> list[Any]:
    flags = {name: value for name, value in combination.items() if name != "logprobs"}
    if combination["logprobs"] is not None:
        sampling["logprobs"] = combination["logprobs"]
    return make_inputs(PROMPT, {**GREEDY, **sampling}, **flags)


def check_outputs(combination: Combination, results: list[Any], num_tokens: int) -> None:
    """What must hold of the additional outputs, whatever the text is."""
    reasons, sums, counted = [], [], 0
    for result in results:
        assert len(strings(result, "text_output")) == 1
        for flag in FLAGS:
            sent = result.as_numpy(flag.removeprefix("return_")) is not None
            assert sent is (combination[flag] is True), flag
        if combination["return_finish_reason"]:
            reasons += strings(result, "finish_reason")
        if combination["return_cumulative_logprob"]:
            sums += result.as_numpy("cumulative_logprob").tolist()
        if combination["return_num_input_tokens"]:
            assert 0 < int(result.as_numpy("num_input_tokens")[0]) <= len(PROMPT)
        num_new = None
        if combination["return_num_output_tokens"]:
            (num_new,) = result.as_numpy("num_output_tokens").tolist()
            assert num_new > 0
            counted += num_new
        if combination["return_logprobs"]:
            check_logprobs(json.loads(strings(result, "logprobs")[0]), combination, num_new)
    if combination["return_finish_reason"]:
        assert reasons == ["None"] * (len(results) - 1) + ["length"]
    if combination["return_cumulative_logprob"]:
        assert len(set(sums)) == len(results)
    if combination["return_num_output_tokens"]:
        assert counted == num_tokens


def check_logprobs(tokens: Any, combination: Combination, num_new: int | None) -> None:
    asked = combination["logprobs"]
    if asked is None:
        assert tokens is None
        return
    assert len(tokens) >= 1
    assert num_new is None or len(tokens) == num_new
    for entries in tokens:
        assert 1 <= len(entries) <= asked + 1
        for entry in entries.values():
            # A token that is no whole text has ours besides: it cannot be told by decoded_token.
            cut = {"bytes"} if "\ufffd" in entry["decoded_token"] else set()
            assert set(entry) == {"logprob", "rank", "decoded_token"} | cut
        ranks = [entry["rank"] for entry in entries.values()]
        assert ranks.count(1) == 1
        by_rank = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert by_rank == sorted(entries.values(), key=lambda entry: -entry["logprob"])


async def run_all(port: int, cases: list[Combination]) -> list[list[Any]]:
    """The results of one request for each case, all through one client."""
    places = asyncio.Semaphore(AT_ONCE)
    async with stock_aio.InferenceServerClient(f"localhost:{port}") as client:

        async def run_one(combination: Combination) -> list[Any]:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                yield {
                    "model_name": "llm",
                    "inputs": inputs_of(combination, max_tokens=NUM_TOKENS),
                }

            results = []
            async with places:
                async for result, error in client.stream_infer(requests()):
                    assert error is None, error.message()
                    results.append(result)
            return results

        return await asyncio.gather(*map(run_one, cases))


def test_additional_outputs_in_all_1458_combinations(tiny_server: RunningServer) -> None:
    cases = combinations()
    assert len(cases) == 1458
    results = asyncio.run(run_all(tiny_server.grpc_port, cases))
    for combination, responses in zip(cases, results):
        # Never an empty response at the end: as many as there are tokens, unless steps were merged.
        most = NUM_TOKENS if combination["stream"] else 1
        assert 1 <= len(responses) <= most, combination
        check_outputs(combination, responses, NUM_TOKENS)
    tiny_server.idle_stats()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [0, 2])
def test_logprobs_spell_the_text(
    small_pool_server: RunningServer, stream: bool, logprobs: int
) -> None:
    combination = {"stream": stream, "logprobs": logprobs, **dict.fromkeys(FLAGS, True)}
    inputs = inputs_of(combination, max_tokens=16, skip_special_tokens=False)
    results = run(small_pool_server.grpc_port, inputs)
    check_outputs(combination, results, 16)
    whole = ""
    for result in results:
        tokens = json.loads(strings(result, "logprobs")[0])
        chosen = [
            entry["decoded_token"] for token in tokens for entry in token.values()
            if entry["rank"] == 1
        ]  # fmt: skip
        text = strings(result, "text_output")[0]
        assert text == ("" if stream else PROMPT) + "".join(chosen)
        whole += text
    assert whole.count(" ") > 4


def test_two_prompts_on_one_stream_come_token_by_token(small_pool_server: RunningServer) -> None:
    """A response brings the text of one token, or of some where steps have outrun the sending."""
    prompts = ["The capital of France is", "The future of AI is"]
    expected = []
    with small_pool_server.client() as client:
        for prompt in prompts:
            ids = client.generate(prompt, temperature=0, ignore_eos=True).token_ids
            assert ids is not None and len(ids) == 16
            expected.append([client.detokenize([token_id]) for token_id in ids])
    with Stream(small_pool_server.grpc_port) as stream:
        for number, prompt in enumerate(prompts):
            stream.send("llm", make_inputs(prompt, GREEDY, stream=True), request_id=str(number))
        results = stream.wait_for(2)
    assert all(error is None for _, error in results)
    deltas: list[list[str]] = [[], []]
    for result, _ in results:
        deltas[int(result.get_response().id)] += strings(result, "text_output")
    for sent, tokens in zip(deltas, expected):
        assert 1 < len(sent) <= len(tokens)
        assert "".join(sent) == "".join(tokens)
        ends = set(itertools.accumulate(map(len, tokens)))
        assert ends.issuperset(itertools.accumulate(map(len, sent)))


def test_when_the_input_comes_back(tiny_server: RunningServer) -> None:
    port = tiny_server.grpc_port
    sampling = {**GREEDY, "max_tokens": 5}

    def text(**flags: bool) -> str:
        results = run(port, make_inputs(PROMPT, sampling, **flags))
        return "".join(strings(result, "text_output")[0] for result in results)

    output = text(exclude_input_in_output=True)
    assert text() == text(exclude_input_in_output=False) == PROMPT + output
    assert text(stream=False) == PROMPT + output
    assert text(stream=True) == text(stream=True, exclude_input_in_output=True) == output
    message = error_of(port, make_inputs(PROMPT, stream=True, exclude_input_in_output=False))
    assert message.startswith("INVALID_ARG exclude_input_in_output: ")
    assert "When streaming, `exclude_input_in_output` = False is not allowed." in message


def test_a_cancel_has_one_callback_and_ends_the_requests(endless_server: RunningServer) -> None:
    before = endless_server.idle_stats()["scheduled_tokens"]
    with Stream(endless_server.grpc_port) as stream, endless_server.client() as client:
        for _ in range(12):  # some run, some wait
            stream.send("llm", make_inputs(PROMPT, {**GREEDY, "max_tokens": 50_000}))
        wait_for(lambda: client.stats()["scheduled_tokens"] > before, "they are being computed")
        stream.cancel()
        ((result, error),) = stream.wait_for(1)
    assert result is None
    assert error.status() == "StatusCode.CANCELLED"
    after = endless_server.idle_stats()["scheduled_tokens"]
    assert after - before < 12 * 50_000


def test_parameters_as_a_tensor_and_as_request_parameters(tiny_server: RunningServer) -> None:
    port = tiny_server.grpc_port

    def num_tokens(inputs: list[Any], **parameters: Any) -> int:
        results = run(port, inputs, parameters=parameters)
        return sum(int(result.as_numpy("num_output_tokens")[0]) for result in results)

    counted = {"return_num_output_tokens": True}
    alone = make_inputs(PROMPT, **counted)
    both = make_inputs(PROMPT, {"max_tokens": "7", "ignore_eos": "True"}, **counted)
    assert num_tokens(alone, ignore_eos=True) == 16  # vLLM's default
    assert num_tokens(alone, max_tokens=3, ignore_eos="true", traceparent="00-1", x=1.5) == 3
    assert num_tokens(both, max_tokens=3) == 7
    message = error_of(port, alone, parameters={"temperature": "hot"})
    assert message.startswith("INVALID_ARG sampling_parameters.temperature: ")


def test_the_best_beams_come_at_the_end(tiny_server: RunningServer, tiny_model: Path) -> None:
    beams = {
        "use_beam_search": True, "beam_width": 4, "n": 2, "length_penalty": 0.5,
        "early_stopping": True, "max_tokens": 8, "ignore_eos": True,
    }  # fmt: skip
    spelled = {name: json.dumps(value) for name, value in beams.items()}
    asked = dict.fromkeys(
        ("return_finish_reason", "return_cumulative_logprob", "return_num_output_tokens"), True
    )
    told = []
    for sampling, stream in itertools.product((beams, spelled), (False, True)):
        inputs = make_inputs(
            PROMPT, sampling, stream=stream, exclude_input_in_output=True,
            return_token_ids=True, **asked,
        )  # fmt: skip
        (result,) = run(tiny_server.grpc_port, inputs)
        assert strings(result, "finish_reason") == ["length"] * 2
        assert result.as_numpy("num_output_tokens").tolist() == [8, 8]
        told.append(
            (
                strings(result, "text_output"),
                result.as_numpy("token_ids").tolist(),
                result.as_numpy("cumulative_logprob").tolist(),
            )
        )
    assert told == told[:1] * 4
    texts, token_ids, sums = told[0]
    assert sums[0] > sums[1]
    harness = Harness(make_engine(tiny_model, num_blocks=64))
    name = harness.add(
        Tokenizer.from_folder(tiny_model).encode(PROMPT), **{**beams, "temperature": 1.0}
    )  # fmt: skip
    harness.run()
    own = [harness.outcomes[name, index] for index in range(2)]
    assert token_ids == own[0].token_ids + own[1].token_ids
    assert texts == [outcome.text for outcome in own]
    inputs = make_inputs(PROMPT, {"use_beam_search": "true"})
    assert "sampling_parameters.beam_width: must be at least 2" in error_of(
        tiny_server.grpc_port, inputs
    )


def test_a_prompt_and_nothing_more(tiny_server: RunningServer) -> None:
    for stream in (False, True):
        inputs = make_inputs(
            PROMPT, {"max_tokens": "0"}, stream=stream, exclude_input_in_output=True,
            return_finish_reason=True, return_num_output_tokens=True, return_num_input_tokens=True,
        )  # fmt: skip
        (result,) = run(tiny_server.grpc_port, inputs)
        assert strings(result, "text_output") == [""]
        assert strings(result, "finish_reason") == ["length"]
        assert result.as_numpy("num_output_tokens").tolist() == [0]
        assert result.as_numpy("num_input_tokens")[0] > 0
    text = "sampling_parameters.n: must be left out when max_tokens is 0"
    inputs = make_inputs(PROMPT, {"max_tokens": 0, "n": 2})
    assert text in error_of(tiny_server.grpc_port, inputs)


def test_times_of_a_request(tiny_server: RunningServer) -> None:
    began = time.time_ns()
    inputs = make_inputs(
        PROMPT, {**GREEDY, "max_tokens": 20}, stream=True, return_perf_metrics=True
    )
    results = run(tiny_server.grpc_port, inputs)
    names = ("arrival", "first_scheduled", "first_token", "last_token")
    for result in results:
        times = [int(result.as_numpy(f"{name}_time_ns")[0]) for name in names]
        # The server's clock is read apart from its monotonic one.
        assert [began - 1_000_000_000, *times] == sorted([began - 1_000_000_000, *times])
        assert times[-1] <= time.time_ns() + 1_000_000_000
    assert times[-1] > times[-2]


def test_a_salt_keeps_prefixes_apart(tiny_server: RunningServer) -> None:
    prompt = "one two three four five six seven eight nine ten " * 2

    def num_cached(salt: str) -> int:
        inputs = make_inputs(
            prompt, {"max_tokens": 1}, return_num_cached_tokens=True, cache_salt=salt
        )
        (result,) = run(tiny_server.grpc_port, inputs)
        return int(result.as_numpy("num_cached_tokens")[0])

    assert num_cached("a") == 0
    assert num_cached("b") == 0
    assert num_cached("a") > 0


def test_a_deadline_ends_a_request_and_says_so(tiny_server: RunningServer) -> None:
    inputs = make_inputs(PROMPT, {**GREEDY, "max_tokens": 230}, stream=True)
    with Stream(tiny_server.grpc_port) as stream:
        stream.send("llm", inputs, timeout=1000)
        results = stream.wait_for(1)
    *data, (_, error) = results
    assert [error for _, error in data] == [None] * len(data)
    assert error.message().startswith("UNAVAILABLE timeout: has passed")
    body = {
        "text_input": PROMPT, "timeout": 1000,
        "sampling_parameters": json.dumps({**GREEDY, "max_tokens": 230}),
    }  # fmt: skip
    _, text = tiny_server.post("/v2/models/llm/generate", body)
    assert json.loads(text)["error"].startswith("UNAVAILABLE timeout: has passed")
    _, text = tiny_server.post("/v2/models/llm/generate", {**body, "timeout": "soon"})
    assert json.loads(text)["error"].startswith("INVALID_ARG timeout: ")
    with (
        tiny_server.client(retries=0) as client,
        pytest.raises((DeadlineExceeded, Unavailable)),
    ):
        client.generate(PROMPT, timeout=0.02, max_tokens=230, ignore_eos=True)
    assert run(tiny_server.grpc_port, make_inputs(PROMPT, GREEDY), timeout=60_000_000)
    tiny_server.idle_stats()


def test_generate_and_generate_stream(tiny_server: RunningServer) -> None:
    body: dict[str, Any] = {
        "text_input": PROMPT, "id": "7", "return_num_output_tokens": True,
        "return_finish_reason": False,
        "parameters": {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "priority": 3},
    }  # fmt: skip
    status, text = tiny_server.post("/v2/models/llm/generate", body)
    answer = json.loads(text)
    assert status == 200
    assert set(answer) == {
        "id", "model_name", "model_version", "text_output", "num_output_tokens",
    }  # fmt: skip
    assert (answer["id"], answer["num_output_tokens"]) == ("7", 5)
    assert answer["text_output"].startswith(PROMPT)

    request = urllib.request.Request(
        tiny_server.url("/v2/models/llm/generate_stream"),
        json.dumps({**body, "stream": True, "return_finish_reason": True}).encode(),
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = response.read().decode().split("\n\n")
    assert lines.pop() == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert PROMPT + "".join(event["text_output"] for event in events) == answer["text_output"]
    assert sum(event["num_output_tokens"] for event in events) == 5
    reasons = [event["finish_reason"] for event in events]
    assert reasons == ["None"] * (len(events) - 1) + ["length"]

    error = tiny_server.post("/v2/models/llm/generate_stream", {**body, "image": ["x"]})[1]
    assert error.startswith('data: {"error":"INVALID_ARG image: ')


def test_control_operations_need_no_place_in_the_queue(endless_server: RunningServer) -> None:
    with endless_server.client(retries=0) as client:
        streams = [client.stream(PROMPT, max_tokens=14_000, ignore_eos=True) for _ in range(8)]
        wait_for(lambda: client.stats()["num_waiting_seqs"] > 0, "some wait")
        ids = client.tokenize(PROMPT)
        assert client.detokenize(ids) == PROMPT
        stats = client.stats()
        assert stats["num_running_seqs"] == 4
        assert stats["num_held_blocks"] + stats["num_free_blocks"] == stats["num_blocks"]
        for stream in streams:
            stream.cancel()
    endless_server.idle_stats()


def test_ids_in_and_out(tiny_server: RunningServer) -> None:
    with tiny_server.client() as client:
        ids = client.tokenize(PROMPT)
        by_ids = client.generate(ids, max_tokens=6, temperature=0, ignore_eos=True)
        by_text = client.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.token_ids is not None
    assert np.all(np.array(by_ids.token_ids) >= 0)
