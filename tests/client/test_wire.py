"""Tensors to bytes and back, checked against the protocol's own layout."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from trident_client.errors import InvalidArgument, ServerError
from trident_client.wire import INPUTS, OUTPUTS, build_request, decode, encode, parse_response

from .fake_server import EMBED_INPUTS, OUTPUT_TYPES, TRIDENT_INPUTS, VLLM_INPUTS, message


def test_the_table_is_the_contract() -> None:
    assert {name: tensor.datatype for name, tensor in INPUTS.items()} == {
        name: datatype
        for name, datatype in (TRIDENT_INPUTS | EMBED_INPUTS).items()
        if name != "image"
    }
    assert {name for name, tensor in INPUTS.items() if tensor.stock} == set(VLLM_INPUTS) - {"image"}
    assert all(OUTPUT_TYPES[name] == tensor.datatype for name, tensor in OUTPUTS.items())
    assert INPUTS["text_input"].config_type == "TYPE_STRING"
    assert OUTPUTS["num_input_tokens"].config_type == "TYPE_UINT32"


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本語 🎉 \x00 \n"])
def test_text_survives(text: str) -> None:
    shape, raw = encode(INPUTS["text_input"], text)
    assert shape == [1]
    assert raw == struct.pack("<I", len(text.encode())) + text.encode()
    assert decode("BYTES", raw) == [text]


def test_half_a_surrogate_pair_is_refused_by_field() -> None:
    with pytest.raises(InvalidArgument, match="character 1") as caught:
        encode(INPUTS["text_input"], "a\ud83d")
    assert caught.value.field == "text_input"


def test_ids_may_be_any_integers() -> None:
    assert encode(INPUTS["input_ids"], [0, 2**31 - 1]) == ([2], struct.pack("<2i", 0, 2**31 - 1))
    array = np.array([3, 4], np.int64)
    assert encode(INPUTS["input_ids"], array) == ([2], struct.pack("<2i", 3, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.0], [[1]], [True], ["1"], [[1], [1, 2]]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode(INPUTS["input_ids"], ids)
    assert caught.value.field == "input_ids"


def test_a_request_asks_for_the_empty_final_mark_and_carries_its_timeout() -> None:
    request = build_request(
        "llm", {"text_input": "hi", "stream": True}, version="2", request_id="r", timeout=1.5
    )
    assert (request.model_name, request.model_version, request.id) == ("llm", "2", "r")
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True
    assert request.parameters["timeout"].int64_param == 1_500_000
    assert [tensor.name for tensor in request.inputs] == ["text_input", "stream"]
    assert list(request.raw_input_contents) == [b"\2\0\0\0hi", b"\1"]
    assert "timeout" not in build_request("llm", {}).parameters


def test_a_response_is_read_and_unknown_outputs_left_out() -> None:
    response = parse_response(
        message(
            text_output=["a", "é"],
            cumulative_logprob=[-0.5, -1.5],
            num_output_tokens=[3, 4],
            an_output_of_a_newer_server=["?"],
            final=True,
        )
    )
    assert response.final
    assert response.texts("text_output") == ["a", "é"]
    assert response.numbers("cumulative_logprob") == [-0.5, -1.5]
    assert response.numbers("num_output_tokens") == [3, 4]
    assert response.texts("finish_reason") == response.numbers("token_ids") == []
    assert set(response.outputs) == {"text_output", "cumulative_logprob", "num_output_tokens"}
    assert parse_response(message(error="bad")).error == "bad"


def test_bytes_that_are_no_utf8_do_not_fail_the_call() -> None:
    assert decode("BYTES", b"\2\0\0\0a\xff") == ["a\ufffd"]


@pytest.mark.parametrize("raw", [b"\5\0\0\0ab", b"\1\0"])
def test_a_cut_string_is_a_server_error(raw: bytes) -> None:
    reply = message(text_output=["x"])
    reply.infer_response.raw_output_contents[0] = raw
    with pytest.raises(ServerError, match="text_output"):
        parse_response(reply)


def test_a_wrong_type_or_missing_bytes_are_server_errors() -> None:
    reply = message(text_output=["x"])
    reply.infer_response.outputs[0].datatype = "FP32"
    with pytest.raises(ServerError, match="FP32"):
        parse_response(reply)
    del reply.infer_response.raw_output_contents[:]
    with pytest.raises(ServerError, match="without the bytes"):
        parse_response(reply)
