"""The tensors that travel between client and server: names, types, and their bytes.

Owns the table of inputs and outputs and their encoding; knows nothing about prompts, sampling or
calls. Invariant: `INPUTS` and `OUTPUTS` are all that this package ever sends or reads, so comparing
them with a model's config.pbtxt compares the whole contract.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from trident_client.errors import ServerError, invalid

__all__ = [
    "INPUTS",
    "OUTPUTS",
    "Response",
    "Tensor",
    "Value",
    "build_request",
    "decode",
    "encode",
    "parse_response",
]

Array = npt.NDArray[Any]
Value = str | bool | Sequence[int]
"""What an input may hold: text, a flag or token ids."""


@dataclass(frozen=True)
class Tensor:
    """One input or output as config.pbtxt declares it; -1 in `dims` is any length.

    `datatype` is the protocol's name (``BYTES``), `config_type` the configuration's (``TYPE_STRING``).
    `stock` tells that vllm_backend has it too.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    stock: bool = False

    @property
    def config_type(self) -> str:
        return "TYPE_" + ("STRING" if self.datatype == "BYTES" else self.datatype)


def _table(*tensors: Tensor) -> Mapping[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}


INPUTS = _table(
    Tensor("text_input", "BYTES", (1,), stock=True),
    Tensor("stream", "BOOL", (1,), stock=True),
    Tensor("sampling_parameters", "BYTES", (1,), stock=True),
    Tensor("exclude_input_in_output", "BOOL", (1,), stock=True),
    Tensor("return_finish_reason", "BOOL", (1,), stock=True),
    Tensor("return_cumulative_logprob", "BOOL", (1,), stock=True),
    Tensor("return_logprobs", "BOOL", (1,), stock=True),
    Tensor("return_num_input_tokens", "BOOL", (1,), stock=True),
    Tensor("return_num_output_tokens", "BOOL", (1,), stock=True),
    Tensor("embedding_request", "BYTES", (1,), stock=True),
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("chat", "BYTES", (1,)),
    Tensor("control", "BYTES", (1,)),
    Tensor("cache_salt", "BYTES", (1,)),
    Tensor("return_token_ids", "BOOL", (1,)),
    Tensor("return_stop_reason", "BOOL", (1,)),
    Tensor("return_num_cached_tokens", "BOOL", (1,)),
    Tensor("return_prompt_logprobs", "BOOL", (1,)),
    Tensor("return_perf_metrics", "BOOL", (1,)),
    Tensor("return_embedding", "BOOL", (1,)),
)

OUTPUTS = _table(
    Tensor("text_output", "BYTES", (-1,), stock=True),
    Tensor("finish_reason", "BYTES", (-1,), stock=True),
    Tensor("cumulative_logprob", "FP32", (-1,), stock=True),
    Tensor("logprobs", "BYTES", (-1,), stock=True),
    Tensor("num_input_tokens", "UINT32", (1,), stock=True),
    Tensor("num_output_tokens", "UINT32", (-1,), stock=True),
    Tensor("token_ids", "INT32", (-1,)),
    Tensor("stop_reason", "BYTES", (-1,)),
    Tensor("num_cached_tokens", "UINT32", (1,)),
    Tensor("prompt_logprobs", "BYTES", (1,)),
    Tensor("arrival_time_ns", "INT64", (1,)),
    Tensor("first_scheduled_time_ns", "INT64", (1,)),
    Tensor("first_token_time_ns", "INT64", (1,)),
    Tensor("last_token_time_ns", "INT64", (1,)),
    Tensor("embedding", "FP32", (-1,)),
    Tensor("control_output", "BYTES", (1,)),
)

# Little-endian on the wire, whatever the machine.
_DTYPES = {"INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "FP32": "<f4", "BOOL": "?"}
_INT32_MAX = 2**31 - 1


def encode(tensor: Tensor, value: Value) -> tuple[list[int], bytes]:
    """Shape and bytes of `value` in `tensor`.

    Raises `InvalidArgument` for text that is not Unicode and for ids that are no int32 from 0 up.

    >>> encode(INPUTS["text_input"], "hé")
    ([1], b'\\x03\\x00\\x00\\x00h\\xc3\\xa9')
    >>> encode(INPUTS["input_ids"], [1, 2])
    ([2], b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00')
    """
    if isinstance(value, str):
        assert tensor.datatype == "BYTES", tensor
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise invalid(
                tensor.name,
                f"must be valid Unicode, but character {error.start} is half of a surrogate pair",
            ) from None
        return [1], struct.pack("<I", len(data)) + data
    if isinstance(value, bool):
        assert tensor.datatype == "BOOL", tensor
        return [1], b"\x01" if value else b"\x00"
    assert tensor.datatype == "INT32", tensor
    ids = np.asarray(value, dtype=object)
    if ids.ndim != 1 or not all(_is_token_id(item) for item in ids):
        raise invalid(tensor.name, f"must be a flat list of token ids from 0 to {_INT32_MAX}")
    return [len(ids)], ids.astype("<i4").tobytes()


def _is_token_id(item: object) -> bool:
    whole = isinstance(item, (int, np.integer)) and not isinstance(item, bool)
    return whole and 0 <= int(item) <= _INT32_MAX  # type: ignore[call-overload]


def _decode_bytes(raw: bytes) -> list[str]:
    texts = []
    at = 0
    while at < len(raw):
        if at + 4 > len(raw):
            raise ValueError("a length is cut")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4 + length
        if at > len(raw):
            raise ValueError("a string is cut")
        # A text must never fail the whole call: a stray byte becomes U+FFFD.
        texts.append(raw[at - length : at].decode(errors="replace"))
    return texts


def decode(datatype: str, raw: bytes) -> list[str] | Array:
    """Elements of one output tensor, flat: strings for ``BYTES``, else a numpy array.

    >>> decode("BYTES", b"\\x02\\x00\\x00\\x00hi\\x00\\x00\\x00\\x00")
    ['hi', '']
    >>> decode("UINT32", b"\\x07\\x00\\x00\\x00").tolist()
    [7]
    """
    if datatype == "BYTES":
        return _decode_bytes(raw)
    return np.frombuffer(raw, dtype=_DTYPES[datatype])


def build_request(
    model: str,
    inputs: Mapping[str, Value],
    *,
    version: str = "",
    request_id: str = "",
    timeout: float | None = None,
) -> Any:
    """The ``ModelInferRequest`` for `inputs`; `timeout` (seconds) becomes the request's own, in us."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    # Without it a final mark that comes alone, after the last tokens, would never be sent to us.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout is not None:
        request.parameters["timeout"].int64_param = max(1, round(timeout * 1e6))
    for name, value in inputs.items():
        tensor = INPUTS[name]
        shape, data = encode(tensor, value)
        request.inputs.add(name=name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


@dataclass(frozen=True)
class Response:
    """One message of a stream: `error` is empty unless the request failed."""

    outputs: Mapping[str, list[str] | Array]
    final: bool
    error: str = ""

    def texts(self, name: str) -> list[str]:
        """The strings of output `name`; empty where it was not sent."""
        value = self.outputs.get(name, [])
        return value if isinstance(value, list) else []

    def numbers(self, name: str) -> list[Any]:
        """The numbers of output `name`; empty where it was not sent."""
        value = self.outputs.get(name, [])
        return [] if isinstance(value, list) else value.tolist()


def parse_response(message: Any) -> Response:
    """Read a ``ModelStreamInferResponse``; outputs that the table does not have are left out.

    Raises `ServerError` if the message does not hold what it announces.
    """
    body = message.infer_response
    final = (
        "triton_final_response" in body.parameters
        and body.parameters["triton_final_response"].bool_param
    )
    if message.error_message:
        return Response({}, final, message.error_message)
    outputs: dict[str, list[str] | Array] = {}
    if len(body.outputs) != len(body.raw_output_contents):
        raise ServerError("the server sent a response without the bytes of its outputs")
    for tensor, raw in zip(body.outputs, body.raw_output_contents):
        known = OUTPUTS.get(tensor.name)
        if known is None:
            continue
        try:
            if tensor.datatype != known.datatype:
                raise ValueError(f"it is {tensor.datatype}, not {known.datatype}")
            outputs[tensor.name] = decode(tensor.datatype, raw)
        except ValueError as error:
            raise ServerError(f"the server sent output {tensor.name} unreadably: {error}") from None
    return Response(outputs, bool(final))
