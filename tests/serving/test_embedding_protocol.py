"""What a request for an embedding may say, and what its response holds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.outputs import make_output
from trident_llm.core.embedding import PoolingParams
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.serving.embedding_protocol import (
    INPUTS,
    EmbeddingBuilder,
    ParsedEmbedding,
    parse_embedding_request,
)
from trident_llm.serving.protocol import RawRequest


def text(value: Any) -> Any:
    value = value if isinstance(value, str) else json.dumps(value)
    return np.array([value.encode()], np.object_)


def parse(parameters: Any = None, **inputs: Any) -> ParsedEmbedding:
    tensors = {
        name: value if isinstance(value, np.ndarray) else text(value)
        for name, value in inputs.items()
    }
    return parse_embedding_request(
        RawRequest(tensors, "" if parameters is None else json.dumps(parameters))
    )


def test_texts_and_ids() -> None:
    plain = parse(text_input="Hello")
    assert (plain.text, plain.token_ids, plain.field) == ("Hello", None, "text_input")
    assert not plain.as_text
    ids = parse(input_ids=np.array([3, 4], np.int32))
    assert (ids.text, ids.token_ids, ids.field) == (None, [3, 4], "input_ids")


def test_vllm_backends_request() -> None:
    """Its clients must send text_input too, which is not read beside it."""
    given = {"input": "Hello", "pooling_params": {"dimensions": [8]}}
    parsed = parse(embedding_request=given, text_input="ignored")
    assert (parsed.text, parsed.params) == ("Hello", PoolingParams(dimensions=8))
    assert parsed.as_text
    parsed = parse(embedding_request={"input": [5, 6]}, return_embedding=np.array([True]))
    assert (parsed.text, parsed.token_ids, parsed.as_text) == (None, [5, 6], False)


def test_request_parameters() -> None:
    given = {"dimensions": "8", "normalize": "false", "truncate_prompt_tokens": -1, "trace": "x"}
    assert parse(given, text_input="a").params == PoolingParams(8, False, -1)
    # Over HTTP an input that the model does not have becomes a parameter; this asks for nothing.
    assert parse({"stream": False}, text_input="a").params == PoolingParams()
    # With the request's own object parameters of the transport are not read.
    assert parse({"dimensions": 8}, embedding_request={"input": "a"}).params == PoolingParams()


@pytest.mark.parametrize(
    ("inputs", "parameters", "field"),
    [
        ({}, None, "text_input"),
        ({"text_input": "a", "input_ids": np.array([1])}, None, "text_input"),
        ({"text_input": "a", "control": {"op": "stats"}}, None, "text_input"),
        ({"embedding_request": "{"}, None, "embedding_request"),
        ({"embedding_request": []}, None, "embedding_request"),
        ({"embedding_request": {"input": "a", "model": "x"}}, None, "embedding_request"),
        ({"embedding_request": {}}, None, "embedding_request.input"),
        ({"embedding_request": {"input": ["a", "b"]}}, None, "embedding_request.input"),
        ({"embedding_request": {"input": [1, True]}}, None, "embedding_request.input"),
        (
            {"embedding_request": {"input": "a", "pooling_params": []}}, None,
            "embedding_request.pooling_params",
        ),
        (
            {"embedding_request": {"input": "a", "pooling_params": {"size": 3}}}, None,
            "embedding_request.pooling_params",
        ),
        (
            {"embedding_request": {"input": "a", "pooling_params": {"dimensions": [0]}}}, None,
            "embedding_request.pooling_params.dimensions",
        ),
        ({"text_input": "a"}, {"dimensions": 2.5}, "parameters.dimensions"),
        ({"text_input": "a"}, {"dimensions": "9" * 40}, "parameters.dimensions"),
        ({"text_input": "a"}, {"normalize": 1}, "parameters.normalize"),
        ({"text_input": "a"}, {"truncate_prompt_tokens": 0}, "parameters.truncate_prompt_tokens"),
        ({"text_input": "a"}, {"max_tokens": 4}, "parameters.max_tokens"),
        ({"text_input": "a"}, {"temperature": "0.5"}, "parameters.temperature"),
        ({"text_input": "a"}, {"sampling_parameters": "{}"}, "parameters.sampling_parameters"),
        ({"text_input": "a"}, {"stream": True}, "parameters.stream"),
        ({"text_input": np.array([b"a", b"b"], np.object_)}, None, "text_input"),
        ({"text_input": np.array([b"\xff"], np.object_)}, None, "text_input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(inputs: dict[str, Any], parameters: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(parameters, **inputs)
    assert str(caught.value).startswith(f"INVALID_ARG {field}: ")


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.sampled_from(["input", "pooling_params", "dimensions", "normalize", "op"]) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


@given(
    name=st.sampled_from(["embedding_request", "control", "parameters"]),
    value=st.dictionaries(KEYS, VALUES, max_size=4) | VALUES,
    beside=st.booleans(),
)
def test_any_json_is_read_or_refused_by_name(name: str, value: Any, beside: bool) -> None:
    inputs = {"text_input": "a"} if beside or name == "parameters" else {}
    error, parsed = None, None
    try:
        if name == "parameters":
            parsed = parse(value, **inputs)
        else:
            parsed = parse(**inputs, **{name: json.dumps(value)})
    except RequestError as refusal:
        error = refusal
    if error is not None:
        assert error.code is ErrorCode.INVALID_ARG
        assert error.field.partition(".")[0] in {*INPUTS, "parameters"}
    if parsed is not None:
        given = (parsed.text, parsed.token_ids, parsed.control)
        assert sum(each is not None for each in given) == 1


def test_responses() -> None:
    output = make_output("r", finished=True)
    output.embedding = np.array([0.5, -1.0], np.float32)
    plain = EmbeddingBuilder(parse(text_input="a")).tensors(output)
    assert set(plain) == {"embedding"}
    assert plain["embedding"].tolist() == [0.5, -1.0]
    flags = {
        "return_num_input_tokens": np.array([True]),
        "return_num_output_tokens": np.array([True]),
    }
    given = parse(embedding_request={"input": "a"}, **flags)
    theirs = EmbeddingBuilder(given).tensors(output)
    assert set(theirs) == {"text_output", "num_input_tokens", "num_output_tokens"}
    assert json.loads(theirs["text_output"][0]) == [0.5, -1.0]
    assert theirs["num_input_tokens"].tolist() == [5]
    assert theirs["num_output_tokens"].tolist() == [0]
