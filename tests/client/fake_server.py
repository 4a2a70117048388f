"""A real gRPC server in this process that plays the Triton side of the protocol from a script.

It decodes requests and encodes responses by the protocol's own rules, not with the client's code, so
that a mistake in that code cannot hide. It records each request and how its RPC ended.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

WAIT = 60.0  # seconds until a test that hangs gives up; nothing waits that long when all is well

VLLM_INPUTS = {
    "text_input": "BYTES",
    "image": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "embedding_request": "BYTES",
}
TRIDENT_INPUTS = VLLM_INPUTS | {
    "input_ids": "INT32",
    "chat": "BYTES",
    "control": "BYTES",
    "cache_salt": "BYTES",
    "return_token_ids": "BOOL",
    "return_stop_reason": "BOOL",
    "return_num_cached_tokens": "BOOL",
    "return_prompt_logprobs": "BOOL",
    "return_perf_metrics": "BOOL",
}
EMBED_INPUTS = {
    "text_input": "BYTES",
    "embedding_request": "BYTES",
    "input_ids": "INT32",
    "control": "BYTES",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_embedding": "BOOL",
}
_INPUT_TYPES = TRIDENT_INPUTS | EMBED_INPUTS
OUTPUT_TYPES = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "token_ids": "INT32",
    "stop_reason": "BYTES",
    "num_cached_tokens": "UINT32",
    "prompt_logprobs": "BYTES",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
    "embedding": "FP32",
    "control_output": "BYTES",
    "an_output_of_a_newer_server": "BYTES",
}
_FORMATS = {"UINT32": "I", "INT32": "i", "INT64": "q", "FP32": "f"}


def _bytes(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def message(*, final: bool = False, error: str = "", **outputs: list[Any]) -> Any:
    """A stream message with these outputs, or this error."""
    reply = service_pb2.ModelStreamInferResponse(error_message=error)
    body = reply.infer_response
    body.parameters["triton_final_response"].bool_param = final
    for name, values in outputs.items():
        datatype = OUTPUT_TYPES[name]
        body.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        if datatype == "BYTES":
            raw = b"".join(map(_bytes, values))
        else:
            raw = struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
        body.raw_output_contents.append(raw)
    return reply


class Request:
    """A request as it arrived. `ended` is set when its RPC is over, however that came."""

    def __init__(self, proto: Any, context: grpc.ServicerContext) -> None:
        self.proto = proto
        self.context = context
        self.headers = dict(context.invocation_metadata())
        self.inputs = {
            tensor.name: self._decode(tensor, raw)
            for tensor, raw in zip(proto.inputs, proto.raw_input_contents)
        }
        self.sampling = json.loads(self.inputs.get("sampling_parameters", "{}"))
        self.seconds_left = context.time_remaining()
        self.served = False
        self.ended = threading.Event()
        if not context.add_callback(self.ended.set):
            self.ended.set()

    @staticmethod
    def _decode(tensor: Any, raw: bytes) -> Any:
        assert tensor.datatype == _INPUT_TYPES[tensor.name], tensor.name
        if tensor.datatype == "BYTES":
            assert list(tensor.shape) == [1]
            (length,) = struct.unpack_from("<I", raw)
            assert len(raw) == 4 + length
            return raw[4:].decode()
        if tensor.datatype == "BOOL":
            assert list(tensor.shape) == [1]
            assert raw in (b"\0", b"\1")
            return raw == b"\1"
        return list(struct.unpack(f"<{tensor.shape[0]}i", raw))

    def cancelled(self) -> bool:
        """Wait for the end of the RPC; whether it ended before all was said."""
        assert self.ended.wait(WAIT), "the server saw no end of the request"
        return not self.served


Script = Callable[[Request], Iterator[Any]]


def hello(request: Request) -> Iterator[Any]:
    """The default script: "Hello there" in three pieces, or whole; tokenizing is ord()."""
    if "control" in request.inputs:
        operation = json.loads(request.inputs["control"])
        yield message(control_output=[json.dumps(_control(operation))], final=True)
    elif request.inputs["stream"]:
        for number, text in enumerate(("Hel", "lo th", "ere")):
            last = number == 2
            yield message(
                text_output=[text],
                finish_reason=["stop" if last else "None"],
                stop_reason=["None"],
                num_input_tokens=[5],
                num_output_tokens=[1],
                num_cached_tokens=[4],
                token_ids=[number + 10],
                final=last,
            )
    else:
        yield message(
            text_output=["Hello there"],
            finish_reason=["stop"],
            num_input_tokens=[5],
            num_output_tokens=[3],
            num_cached_tokens=[4],
            token_ids=[10, 11, 12],
            final=True,
        )


def _control(operation: dict[str, Any]) -> dict[str, Any]:
    if operation["op"] == "tokenize":
        return {"token_ids": [ord(character) for character in operation["text"]]}
    if operation["op"] == "detokenize":
        return {"text": "".join(map(chr, operation["token_ids"]))}
    return {"num_free_blocks": 7}


def forever(request: Request) -> Iterator[Any]:
    """One token, then nothing until the client is gone."""
    yield message(text_output=["first"], finish_reason=["None"], num_output_tokens=[1])
    request.ended.wait(WAIT)


def embedding(request: Request) -> Iterator[Any]:
    """As a model that embeds: of length 3, beginning with the length of the input."""
    asked = json.loads(request.inputs["embedding_request"])
    (size,) = asked.get("pooling_params", {}).get("dimensions", [3])
    length = len(asked["input"])
    assert request.inputs["return_embedding"]
    yield message(embedding=[float(length), 1.0, 0.5][:size], num_input_tokens=[length], final=True)


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Listens on `url`, with TLS if `credentials` are given.

    `script` answers requests, `inputs` is what the model claims to have.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.script: Script = hello
        self.inputs = dict(TRIDENT_INPUTS)
        self.ready = True
        self.model = "llm"
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)
        self.metadata_calls = 0
        self.metadata_failures: list[tuple[grpc.StatusCode, str]] = []
        self._server = grpc.server(ThreadPoolExecutor(64))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        port = (
            self._server.add_insecure_port("localhost:0")
            if credentials is None
            else self._server.add_secure_port("localhost:0", credentials)
        )
        self.url = f"localhost:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait(WAIT)

    def one(self) -> Request:
        """The next request not yet waited for, once it arrived."""
        assert self.arrived.acquire(timeout=WAIT), "no request arrived"
        return self.requests[-1]

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready and request.name == self.model)

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.metadata_calls += 1
        if self.metadata_failures:
            context.abort(*self.metadata_failures.pop(0))
        if request.name != self.model:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"Request for unknown model: '{request.name}' is not found",
            )
        reply = service_pb2.ModelMetadataResponse(
            name=self.model, versions=["1"], platform="python"
        )
        for name, datatype in self.inputs.items():
            reply.inputs.add(name=name, datatype=datatype, shape=[1])
        for name, datatype in OUTPUT_TYPES.items():
            reply.outputs.add(name=name, datatype=datatype, shape=[-1])
        return reply

    def ModelStreamInfer(
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        for proto in request_iterator:
            request = Request(proto, context)
            self.requests.append(request)
            self.arrived.release()
            yield from self.script(request)
            request.served = request.context.is_active()
