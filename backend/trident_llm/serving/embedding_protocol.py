"""The contract of a model that embeds: tensors in, tensors out.

The tables below are stated once more in ``model_repository/embed/config.pbtxt``; a test holds them
equal. ``embedding_request`` is vllm_backend's: a JSON object with ``input``, a text or token ids, and
``pooling_params``, answered with a JSON list in ``text_output``, or with ``return_embedding`` in the
output ``embedding``. ``text_input`` and ``input_ids`` are answered in ``embedding``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trident_llm.core.embedding import POOLING_PARAMS, PoolingParams, parse_pooling_params
from trident_llm.core.errors import invalid
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.output import RequestOutput
from trident_llm.serving.protocol import INPUTS as GENERATION_INPUTS
from trident_llm.serving.protocol import OUTPUTS as GENERATION_OUTPUTS
from trident_llm.serving.protocol import (
    Array,
    RawRequest,
    TensorSpec,
    json_object,
    read_control,
    read_flag,
    read_input_ids,
    read_text,
    strings,
)

INPUTS: dict[str, TensorSpec] = {
    name: GENERATION_INPUTS[name]
    for name in (
        "text_input", "embedding_request", "input_ids", "control", "return_num_input_tokens",
        "return_num_output_tokens",
    )
} | {"return_embedding": TensorSpec("TYPE_BOOL", [1])}  # fmt: skip

OUTPUTS: dict[str, TensorSpec] = {
    "embedding": TensorSpec("TYPE_FP32", [-1]),
    **{
        name: GENERATION_OUTPUTS[name]
        for name in ("text_output", "num_input_tokens", "num_output_tokens", "control_output")
    },
}

_REQUEST = "embedding_request"
# What asks to generate; over HTTP inputs that a model does not have arrive as parameters.
_GENERATION_PARAMS = {entry.name for entry in fields(SamplingParams)}.union(GENERATION_INPUTS)
_GENERATION_PARAMS.difference_update(POOLING_PARAMS, INPUTS)


@dataclass(frozen=True)
class ParsedEmbedding:
    """What a request asks for. Exactly one of text, token_ids and control is set."""

    text: str | None
    token_ids: list[int] | None
    control: Mapping[str, Any] | None
    params: PoolingParams
    field: str  # the input that the text or the ids came in
    params_field: str  # and the parameters
    as_text: bool  # the vector goes into text_output
    returns: frozenset[str]  # gated outputs that were asked for


def parse_embedding_request(raw: RawRequest) -> ParsedEmbedding:
    """What ``raw`` asks for.

    Raises:
        RequestError: INVALID_ARG naming the input at fault.
    """
    control = read_control(raw)
    text, ids, field = read_text(raw, "text_input"), read_input_ids(raw), "text_input"
    request = read_text(raw, _REQUEST)
    as_text = request is not None and not read_flag(raw, "return_embedding")
    params_field = "parameters"
    if request is not None:
        # Clients of vllm_backend must send text_input, which it does not read beside this.
        text, ids, values = _read_request(json_object(_REQUEST, request))
        field, params_field = f"{_REQUEST}.input", f"{_REQUEST}.pooling_params"
    else:
        values = _request_parameters(raw)
        field = field if ids is None else "input_ids"
    if sum(value is not None for value in (text, ids, control)) != 1:
        raise invalid(
            "text_input",
            "exactly one of text_input, input_ids, embedding_request and control must be given",
        )
    returns = ("num_input_tokens", "num_output_tokens")
    return ParsedEmbedding(
        text=text,
        token_ids=ids,
        control=control,
        params=PoolingParams() if control else parse_pooling_params(values, params_field),
        field=field,
        params_field=params_field,
        as_text=as_text,
        returns=frozenset(name for name in returns if read_flag(raw, f"return_{name}")),
    )


def _read_request(
    request: Mapping[str, Any],
) -> tuple[str | None, list[int] | None, Mapping[str, Any]]:
    """Its text or its token ids, and its pooling parameters."""
    for name in request:
        if name not in ("input", "pooling_params"):
            raise invalid(_REQUEST, "holds an unknown key; the keys are: input, pooling_params")
    values = request.get("pooling_params")
    if values is not None and not isinstance(values, dict):
        raise invalid(f"{_REQUEST}.pooling_params", "must be a JSON object")
    value = request.get("input")
    if isinstance(value, str):
        return value, None, values or {}
    if isinstance(value, list) and all(type(item) is int for item in value):
        return None, value, values or {}
    raise invalid(
        f"{_REQUEST}.input", "must be one text or one list of token ids; send a request for each"
    )


def _request_parameters(raw: RawRequest) -> Mapping[str, Any]:
    """The pooling parameters among those of the request; unknown ones may be headers or traces."""
    values = json_object("parameters", raw.parameters) if raw.parameters else {}
    if wrong := sorted(name for name in _GENERATION_PARAMS.intersection(values) if values[name]):
        raise invalid(f"parameters.{wrong[0]}", "is for models that generate; this one embeds")
    return {name: value for name, value in values.items() if name in POOLING_PARAMS}


class EmbeddingBuilder:
    """Turns one request's output into the tensors of its response."""

    def __init__(self, parsed: ParsedEmbedding) -> None:
        self._parsed = parsed

    def tensors(self, output: RequestOutput) -> dict[str, Array]:
        """The response's tensors by name."""
        vector, returns = output.embedding, self._parsed.returns
        assert vector is not None, "a text that was embedded has a vector"
        tensors: dict[str, Array] = {"embedding": vector}
        if self._parsed.as_text:
            tensors = {"text_output": strings([json.dumps(vector.tolist())])}
        if "num_input_tokens" in returns:
            tensors["num_input_tokens"] = np.array([output.num_prompt_tokens], np.uint32)
        if "num_output_tokens" in returns:
            tensors["num_output_tokens"] = np.array([0], np.uint32)
        return tensors
