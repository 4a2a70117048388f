"""Structured outputs from the default model, asked for as users of vllm_backend and of vLLM do."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

from tests.e2e.server import RunningServer
from tests.e2e.stock_client import make_inputs, run, strings
from trident_client import InvalidArgument

pytestmark = pytest.mark.e2e

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_the_stock_client_gets_what_the_schema_says(small_pool_server: RunningServer) -> None:
    """As vllm_backend has it: the value is itself a JSON string, and numbers may be strings."""
    sampling = {
        "temperature": "1.5",
        "max_tokens": "120",
        "seed": "3",
        "structured_outputs": json.dumps({"json": PERSON}),
    }
    inputs = make_inputs("Who is it?", sampling, stream=True, return_finish_reason=True)
    results = run(small_pool_server.grpc_port, inputs)
    text = "".join(strings(result, "text_output")[0] for result in results)
    jsonschema.validate(json.loads(text), PERSON)
    assert strings(results[-1], "finish_reason") == ["stop"]
    assert len(results) > 5


@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        ({"guided_choice": ["Positive", "Negative"]}, "Positive|Negative"),
        ({"guided_regex": r"\d{3}-[a-z]{4}"}, r"\d{3}-[a-z]{4}"),
        ({"guided_grammar": 'root ::= "<" [0-9]+ ">"'}, r"<[0-9]+>"),
        ({"structured_outputs": {"choice": ["one", "two"]}, "ignore_eos": True}, "one|two"),
    ],
)
def test_every_spelling(
    small_pool_server: RunningServer, sampling: dict[str, Any], pattern: str
) -> None:
    with small_pool_server.client() as client:
        result = client.generate(
            "The answer is", n=3, temperature=1.3, seed=1, max_tokens=60, **sampling
        )
    for output in result.choices:
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("sampling", "field", "reason"),
    [
        ({"guided_json": {"type": "foo"}}, "guided_json", "#/type"),
        (
            {"structured_outputs": {"json": {"properties": {"a": {"not": {"type": "null"}}}}}},
            "structured_outputs.json",
            "#/properties/a/not",
        ),
        ({"guided_regex": "("}, "guided_regex", "without its )"),
        ({"guided_regex": "a{1000000000}"}, "guided_regex", "times"),
        ({"guided_grammar": "no grammar"}, "guided_grammar", "::="),
        ({"guided_choice": []}, "guided_choice", "list"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_choice",
            "cannot be given together",
        ),
        ({"guided_grammar": "root ::= undefined_rule"}, "guided_grammar", "cannot be compiled"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    small_pool_server: RunningServer, sampling: dict[str, Any], field: str, reason: str
) -> None:
    with small_pool_server.client() as client:
        with pytest.raises(InvalidArgument, match=re.escape(reason)) as caught:
            client.generate("x", **sampling)
        assert caught.value.field == f"sampling_parameters.{field}"


def test_a_slow_grammar_is_refused_and_streams_go_on(small_pool_server: RunningServer) -> None:
    properties = {f"p{n}": {"type": "string"} for n in range(300)}
    slow = {
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 10,
        "maxProperties": 150,
    }
    plain = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    refused: list[InvalidArgument] = []
    with small_pool_server.client() as client:
        alone = client.generate("Once upon a time", **plain).text

        def ask() -> None:
            try:
                client.generate("x", guided_json=slow)
            except InvalidArgument as error:
                refused.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        during = 0
        while thread.is_alive():
            assert client.generate("Once upon a time", **plain).text == alone
            during += thread.is_alive()
        thread.join()
    assert during >= 1, "nothing came through while the grammar was tried"
    assert len(refused) == 1 and "to compile; make it smaller" in str(refused[0])


def test_cancelled_in_the_middle_everything_is_back(small_pool_server: RunningServer) -> None:
    with (
        small_pool_server.client() as client,
        client.stream("List:", guided_regex="[a-z]{2,900}", max_tokens=500) as stream,
    ):
        for read, _ in enumerate(stream):
            if read == 3:
                break
    small_pool_server.idle_stats()
