"""Keys, limits, sizes, and the paths around the model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.cli.command import wait_for
from tests.client.fake_server import FakeServer, forever, hello
from tests.openai.running import RunningGateway
from tests.openai.scripts import failing
from trident_client.openai.access import Keys

KEY = "secret-one"


@pytest.fixture
def guarded(server: FakeServer, tmp_path: Path) -> Any:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{KEY}\nsecret-two\n")
    with RunningGateway(
        server.url, api_key_file=str(file), max_requests_per_key=1, max_body_bytes=1000
    ) as gateway:
        yield gateway


def test_every_path_but_health_needs_a_key(guarded: RunningGateway) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/nothing", "/v1/models/llm"):
        answer = guarded.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/v1/completions", "/tokenize"):
        assert guarded.post(path, {"prompt": "Hi"}).status_code == 401
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/health/ready").status_code == 200
    for key in ("wrong", KEY + "x", ""):
        with pytest.raises(openai.AuthenticationError):
            guarded.openai(api_key=key or "-").models.list()
    assert guarded.openai(api_key=KEY).models.list().data[0].id == "llm"


def test_each_key_has_a_salt_of_its_own(server: FakeServer, guarded: RunningGateway) -> None:
    for key in (KEY, "secret-two", KEY):
        guarded.openai(api_key=key).completions.create(model="llm", prompt="Hi")
    guarded.openai(api_key=KEY).completions.create(
        model="llm", prompt="Hi", extra_body={"cache_salt": "x"}
    )
    one, two, again, own = [request.inputs["cache_salt"] for request in server.requests]
    assert one == again
    assert len({one, two, own}) == 3
    assert own == f"{one}/x"
    assert KEY not in one
    assert hashlib.sha256(KEY.encode()).hexdigest() not in one


def test_a_key_has_so_many_requests_in_flight(server: FakeServer, guarded: RunningGateway) -> None:
    server.script = forever
    client = guarded.openai(api_key=KEY)
    stream = client.completions.create(model="llm", prompt="Hi", stream=True)
    server.script = hello
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="llm", prompt="Hi")
    assert caught.value.response.headers["retry-after"] == "1"
    guarded.openai(api_key="secret-two").completions.create(model="llm", prompt="Hi")
    stream.close()

    def is_free() -> bool:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = guarded.post("/v1/completions", {"prompt": "Hi"}, headers=headers)
        return answer.status_code == 200

    wait_for(is_free, "the key has room again")


def test_a_large_body_is_refused(server: FakeServer, guarded: RunningGateway) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "x" * 2000}
    assert guarded.post("/v1/completions", body, headers=headers).status_code == 413

    def parts() -> Any:
        for _ in range(20):
            yield b"x" * 100

    answer = httpx.post(guarded.url + "/v1/completions", content=parts(), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert server.requests == []


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    assert not Keys.read(None, {})
    keys = Keys.read(None, {"TRIDENT_API_KEYS": "a, b"})
    assert keys.caller("Bearer b")
    assert keys.caller("bearer a")
    assert keys.caller("Basic a") is None
    assert keys.caller("a") is None
    (tmp_path / "empty").write_text("# none yet\n")
    for path, environment in ((str(tmp_path / "empty"), {}), (None, {"TRIDENT_API_KEYS": ""})):
        with pytest.raises(ValueError, match="holds no API key"):
            Keys.read(path, environment)


@pytest.mark.parametrize(
    "body",
    [
        b"{:", b"", b"\xc4\xe3", b'"text"', b"[]", b'{"prompt": NaN}', b'{"temperature": Infinity}',
        b"[" * 100_000, b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": "secret',
        b'{"temperature": 1e999, "prompt": "secret"}', b"\xff\xfe{}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(
    server: FakeServer, gateway: RunningGateway, body: bytes
) -> None:
    answer = gateway.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "secret" not in answer.text
    assert server.requests == []


def test_a_large_head_is_refused(server: FakeServer, gateway: RunningGateway) -> None:
    with gateway.connect("/v1/completions", b"{}", headers=f"X: {'x' * 20_000}\r\n") as connection:
        assert connection.recv(4096).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    answer = gateway.get("/health", headers={"X": "x" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")
    assert gateway.get("/health?" + "x" * 20_000).status_code == 431


def test_a_body_must_be_called_json(server: FakeServer, gateway: RunningGateway) -> None:
    headers = {"content-type": "text/plain"}
    assert gateway.post("/v1/completions", b"{}", headers=headers).status_code == 415


def test_paths_and_methods_that_are_not_there(gateway: RunningGateway) -> None:
    assert gateway.get("/v1/nothing").json()["error"]["code"] == "not_found"
    answer = gateway.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"]


def test_the_description_is_of_what_is_read(gateway: RunningGateway) -> None:
    described = gateway.get("/openapi.json").json()
    for path, operations in described["paths"].items():
        for method in operations:
            answer = gateway.post(path, {}) if method == "post" else gateway.get(path)
            assert answer.status_code in (200, 400), path
    schemas = described["components"]["schemas"]
    reference = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
    name = reference["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert schemas[name]["required"] == ["prompt"]
    assert schemas[name]["properties"]["max_tokens"]["default"] == 16
    text = json.dumps(described)
    targets = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert targets <= set(schemas)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object) == ("llm", "model")
    assert client.models.retrieve("llm").id == "llm"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="Hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_several_models_must_be_named(server: FakeServer) -> None:
    with RunningGateway(server.url, models=("llm", "other")) as gateway:
        assert gateway.get("/health/ready").status_code == 503
        assert gateway.get("/health/ready").json() == {"models": {"llm": True, "other": False}}
        answer = gateway.post("/v1/completions", {"prompt": "Hi"})
        assert answer.json()["error"]["param"] == "model"
        answer = gateway.post("/v1/completions", {"prompt": "Hi", "model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_not_ready_when_the_engine_does_not_answer(
    server: FakeServer, gateway: RunningGateway
) -> None:
    assert gateway.get("/health/ready").status_code == 200
    server.script = failing("UNAVAILABLE engine: has failed")
    assert gateway.get("/health/ready").status_code == 503
    assert gateway.get("/health").status_code == 200


def test_a_request_id_is_kept_or_given(server: FakeServer, gateway: RunningGateway) -> None:
    headers = {"x-request-id": "mine-1"}
    assert gateway.get("/health", headers=headers).headers["x-request-id"] == "mine-1"
    assert len(gateway.get("/health").headers["x-request-id"]) == 32
    bad = {"x-request-id": "a b"}
    assert gateway.get("/health", headers=bad).headers["x-request-id"] != "a b"


def test_pages_of_listed_origins_may_ask(server: FakeServer) -> None:
    with RunningGateway(server.url, cors_origins=("https://page",)) as gateway:
        for origin, allowed in (("https://page", "https://page"), ("https://else", None)):
            answer = gateway.get("/health", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_tokenize(server: FakeServer, gateway: RunningGateway) -> None:
    answer = gateway.post("/tokenize", {"model": "llm", "prompt": "Hi"}).json()
    assert (answer["tokens"], answer["count"]) == ([72, 105], 2)
    assert gateway.post("/detokenize", {"tokens": [72, 105]}).json() == {"prompt": "Hi"}
    assert json.loads(server.requests[0].inputs["control"])["add_special_tokens"] is True
    assert gateway.post("/tokenize", {"prompt": 5}).json()["error"]["param"] == "prompt"
    assert gateway.post("/detokenize", {"tokens": "Hi"}).json()["error"]["param"] == "tokens"


def test_metrics_count_requests_and_pass_on_the_servers(server: FakeServer) -> None:
    with RunningGateway(server.url) as behind:
        behind.get("/health")
        with RunningGateway(server.url, metrics_url=behind.url + "/metrics") as gateway:
            gateway.post("/v1/completions", {"prompt": "Hi"})
            gateway.post("/v1/completions", {"prompt": 1.5})
            gateway.get("/v1/secret-path")
            text = gateway.get("/metrics").text
    for line in (
        'trident_gateway_requests_total{endpoint="/v1/completions",status="200"} 1',
        'trident_gateway_requests_total{endpoint="/v1/completions",status="400"} 1',
        'trident_gateway_requests_total{endpoint="other",status="404"} 1',
        "trident_gateway_requests_in_flight 1",
        "trident_gateway_server_metrics_up 1",
        'trident_gateway_requests_total{endpoint="/health",status="200"} 1',
    ):
        assert line in text.splitlines()
    assert "secret" not in text


def test_the_asyncio_client(server: FakeServer, gateway: RunningGateway) -> None:
    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:

            async def one() -> str:
                stream = await client.completions.create(model="llm", prompt="Hi", stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(20))))

    assert asyncio.run(main()) == ["Hello there"] * 20
