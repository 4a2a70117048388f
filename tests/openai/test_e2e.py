"""The gateway in front of a real server, started by ``trident serve``, used through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.cli.command import free_ports, wait_for
from tests.e2e.server import RunningServer

pytestmark = pytest.mark.e2e

PROMPT = "The capital of France is"
USER: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Served:
    """A server and the port of its gateway."""

    def __init__(self, server: RunningServer, port: int) -> None:
        self.server = server
        self.url = f"http://localhost:{port}"
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Served]:
    (port,) = free_ports(1)
    with RunningServer(
        tmp_path_factory.mktemp("openai"),
        "--dtype=float32", "--num-blocks=400", "--max-num-seqs=16", "--no-self-check",
        f"--openai-port={port}",
    ) as server:  # fmt: skip
        yield Served(server, port)


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.openai


def test_ready_and_named(served: Served) -> None:
    assert httpx.get(f"{served.url}/health/ready").json() == {"models": {"llm": True}}
    assert [model.id for model in served.openai.models.list()] == ["llm"]


def test_the_text_is_the_servers(served: Served, client: OpenAI) -> None:
    with served.server.client() as direct:
        expected = direct.generate(PROMPT, max_tokens=12, temperature=0)
        ids = direct.tokenize(PROMPT)
    prompts: list[Any] = [PROMPT, ids]
    for prompt in prompts:
        answer = client.completions.create(model="llm", prompt=prompt, max_tokens=12, temperature=0)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
        assert answer.usage.completion_tokens == 12
        chunks = client.completions.create(
            model="llm", prompt=prompt, max_tokens=12, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_chats_streamed_or_whole_many_at_a_time(served: Served, client: OpenAI) -> None:
    whole = client.chat.completions.create(model="llm", messages=USER, max_tokens=16, temperature=0)

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as many:

            async def one() -> str:
                stream = await many.chat.completions.create(
                    model="llm", messages=USER, max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(12))))

    assert asyncio.run(main()) == [whole.choices[0].message.content] * 12


def test_without_a_limit_a_chat_goes_on_to_its_end(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="llm", messages=USER, temperature=0, stop=["."])
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(
        model="llm", messages=USER, temperature=0, max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"


def test_choices_echo_and_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="llm", prompt=[PROMPT, "One, two,"], n=2, seed=1, max_tokens=4, echo=True, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, (PROMPT, PROMPT, "One, two,", "One, two,")):
        assert choice.text.startswith(prompt)
        assert choice.logprobs is not None
        tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
        assert "".join(tokens) == choice.text
        assert all(choice.text[at:].startswith(token) for at, token in zip(offsets, tokens))
    chat = client.chat.completions.create(
        model="llm", messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert len(content) == 4
    for token in content:
        assert bytes(token.bytes or []).decode() == token.token
        assert all(top.bytes for top in token.top_logprobs)
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert token.token == token.top_logprobs[0].token  # greedy


def test_the_bytes_of_a_characters_parts_are_told(client: OpenAI) -> None:
    """Forced to write characters that the model has no token for, it writes their bytes."""
    text = "𒀀𒁀"
    try:
        answer = client.chat.completions.create(
            model="llm", messages=USER, max_tokens=40, temperature=0, logprobs=True,
            extra_body={"guided_choice": [text]},
        )  # fmt: skip
    except openai.BadRequestError as error:
        _skip_without_grammars(error)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert any("\N{REPLACEMENT CHARACTER}" in token.token for token in tokens)
    data = b"".join(bytes(token.bytes or []) for token in tokens)
    assert data.removesuffix(b"<|im_end|>") == text.encode()


def test_a_prompt_is_scored_like_a_continuation(client: OpenAI) -> None:
    made = client.completions.create(
        model="llm", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=0
    ).choices[0]
    scored = client.completions.create(
        model="llm", prompt=PROMPT + made.text, max_tokens=0, echo=True, logprobs=0
    ).choices[0]
    assert made.logprobs is not None
    assert scored.logprobs is not None
    assert scored.logprobs.tokens is not None
    assert scored.logprobs.tokens[-3:] == made.logprobs.tokens
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[-3:] == pytest.approx(
        made.logprobs.token_logprobs, abs=1e-3
    )


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_parameter(client: OpenAI, stream: bool) -> None:
    cases: list[tuple[dict[str, Any], str, str | None]] = [
        ({"temperature": -1}, "temperature", None),
        ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x " * 20_000}, "prompt", "context_length_exceeded"),
        ({"prompt": [10**6]}, "prompt", None),
        ({"stop": [""]}, "stop", None),
        ({"extra_body": {"min_p": 2}}, "min_p", None),
    ]
    for change, param, code in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": "llm", "prompt": "x", "stream": stream, **change})
        assert (caught.value.param, caught.value.code) == (param, code)


def test_callers_that_leave_hold_nothing(served: Served, client: OpenAI) -> None:
    for _ in range(4):
        stream = client.completions.create(
            model="llm", prompt=PROMPT, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(
                model="llm", prompt=PROMPT, max_tokens=300, timeout=0.05,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
    stats = served.server.idle_stats()
    assert stats["num_requests"] == 0


def test_tokens_and_metrics(served: Served, client: OpenAI) -> None:
    answer = httpx.post(f"{served.url}/tokenize", json={"prompt": PROMPT}).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    text = httpx.post(f"{served.url}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert text == {"prompt": PROMPT}
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "trident_gateway_server_metrics_up 1" in metrics
    assert "vllm:num_requests_running" in metrics


def test_the_responses_api(client: OpenAI) -> None:
    answer = client.responses.create(
        model="llm", input=USER[0]["content"], temperature=0, max_output_tokens=8
    )
    with client.responses.stream(
        model="llm", input=USER[0]["content"], temperature=0, max_output_tokens=8
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == answer.output_text != ""
    assert answer.status in ("incomplete", "completed")


class City(BaseModel):
    city: Literal["Paris", "Rome"]
    is_capital: bool


def _skip_without_grammars(error: openai.BadRequestError) -> None:
    if "is not supported" not in str(error):
        raise error
    pytest.skip("this server has no structured outputs")


def test_structured_answers(client: OpenAI) -> None:
    try:
        answer = client.chat.completions.parse(
            model="llm", messages=USER, response_format=City, temperature=0, max_tokens=200
        )
    except openai.BadRequestError as error:
        _skip_without_grammars(error)
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls_always_fit_their_schema(
    client: OpenAI, choice: str, stream: bool
) -> None:
    tool: Any = openai.pydantic_function_tool(City)
    tool_choice: Any = (
        choice if choice == "required" else {"type": "function", "function": {"name": "City"}}
    )
    name, arguments, reason = "", "", None
    try:
        answer: Any = client.chat.completions.create(
            model="llm", messages=USER, tools=[tool], tool_choice=tool_choice, stream=stream,
            parallel_tool_calls=False, temperature=0, max_tokens=200,
        )  # fmt: skip
        for chunk in answer if stream else [answer]:
            part = chunk.choices[0].delta if stream else chunk.choices[0].message
            reason = chunk.choices[0].finish_reason or reason
            for call in part.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments
    except openai.BadRequestError as error:
        _skip_without_grammars(error)
    assert (name, reason) == ("City", "tool_calls")
    assert City.model_validate(json.loads(arguments))


def test_several_processes_share_one_port(served: Served) -> None:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "trident_client.cli", "openai", "--workers=2", f"--port={port}",
            f"--url=localhost:{served.server.grpc_port}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_for(lambda: _answers(port) or process.poll() is not None, "the workers answer")
        with OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none") as client:
            for _ in range(4):
                answer = client.completions.create(model="llm", prompt=PROMPT, max_tokens=2)
                assert answer.choices[0].finish_reason == "length"
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert b"Traceback" not in log, log


def test_a_gateway_that_dies_is_started_again(served: Served, client: OpenAI) -> None:
    port = int(served.url.rpartition(":")[2])
    os.kill(_gateway_process(port), signal.SIGKILL)
    wait_for(lambda: "it is started again" in served.server.log, "its end is noticed")
    wait_for(lambda: _answers(port), "it answers again")
    assert client.completions.create(model="llm", prompt=PROMPT, max_tokens=1).choices[0].text


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://localhost:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _gateway_process(port: int) -> int:
    """The process that was started for this port."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--port={port}".encode() in words and b"openai" in words:
            return int(path.parent.name)
    raise AssertionError("no gateway runs")
