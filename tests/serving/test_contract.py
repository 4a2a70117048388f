"""The contract is stated three times, for Triton, for the engine and for the client: equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trident_client import wire
from trident_llm.serving.protocol import INPUTS, OUTPUTS

CONFIG = Path(__file__).parents[2] / "model_repository/llm/config.pbtxt"


@pytest.fixture(scope="module")
def config() -> Any:
    return text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())


def type_name(number: int) -> str:
    return model_config_pb2.DataType.Name(number)


def test_config_pbtxt_states_the_contract(config: Any) -> None:
    inputs = {t.name: (type_name(t.data_type), list(t.dims)) for t in config.input}
    outputs = {t.name: (type_name(t.data_type), list(t.dims)) for t in config.output}
    assert inputs == {name: (spec.data_type, spec.dims) for name, spec in INPUTS.items()}
    assert outputs == {name: (spec.data_type, spec.dims) for name, spec in OUTPUTS.items()}
    assert all(t.optional for t in config.input)


def test_the_model_is_decoupled_and_unbatched(config: Any) -> None:
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0


def test_the_client_speaks_the_same_tensors() -> None:
    """All but ``image``, which is refused, and ``embedding``, which is a model's of its own."""
    for table, ours in ((wire.INPUTS, INPUTS), (wire.OUTPUTS, OUTPUTS)):
        spoken = {name: (t.config_type, list(t.dims)) for name, t in table.items()}
        spoken.pop("embedding", None)
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
