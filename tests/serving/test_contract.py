"""The contract is stated three times, for Triton, for the engine and for the client: equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trident_client import wire
from trident_llm.serving import embedding_protocol, protocol
from trident_llm.serving.protocol import INPUTS, OUTPUTS

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def read_config(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.fixture(params=["llm", "embed"])
def config(request: pytest.FixtureRequest) -> Any:
    return read_config(request.param)


def type_name(number: int) -> str:
    return model_config_pb2.DataType.Name(number)


@pytest.mark.parametrize(("model", "contract"), [("llm", protocol), ("embed", embedding_protocol)])
def test_config_pbtxt_states_the_contract(model: str, contract: Any) -> None:
    config = read_config(model)
    inputs = {t.name: (type_name(t.data_type), list(t.dims)) for t in config.input}
    outputs = {t.name: (type_name(t.data_type), list(t.dims)) for t in config.output}
    assert inputs == {name: (spec.data_type, spec.dims) for name, spec in contract.INPUTS.items()}
    assert outputs == {name: (spec.data_type, spec.dims) for name, spec in contract.OUTPUTS.items()}
    assert all(t.optional for t in config.input)


def test_the_model_is_decoupled_and_unbatched(config: Any) -> None:
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0


def test_the_client_speaks_the_same_tensors() -> None:
    """All but ``image``, which is refused."""
    both = (
        (wire.INPUTS, INPUTS | embedding_protocol.INPUTS),
        (wire.OUTPUTS, OUTPUTS | embedding_protocol.OUTPUTS),
    )
    for table, ours in both:
        spoken = {name: (t.config_type, list(t.dims)) for name, t in table.items()}
        assert spoken == {name: tuple(spec) for name, spec in ours.items() if name != "image"}


VLLM_INPUTS = {
    "text_input": "TYPE_STRING", "image": "TYPE_STRING", "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING", "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL", "return_cumulative_logprob": "TYPE_BOOL",
    "return_logprobs": "TYPE_BOOL", "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL", "embedding_request": "TYPE_STRING",
}  # fmt: skip
VLLM_OUTPUTS = {
    "text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32", "logprobs": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32", "num_output_tokens": "TYPE_UINT32",
}  # fmt: skip


def test_it_is_a_superset_of_vllm_backends() -> None:
    for wanted, ours in ((VLLM_INPUTS, INPUTS), (VLLM_OUTPUTS, OUTPUTS)):
        assert {name: ours[name].data_type for name in wanted} == wanted
