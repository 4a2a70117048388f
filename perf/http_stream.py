"""One request over HTTP whose answer is a stream of server-sent events, at Triton or at the gateway.

Owns as much of HTTP/1.1 as this needs, so that the benchmark's own cost stays small and no HTTP
library is needed. Invariant: a response is timed when its last byte has come.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from perf.workloads import RequestSpec

_EVENT_END = b"\n\n"


async def generate(url: str, model: str, spec: RequestSpec) -> list[tuple[float, int]]:
    """Times and token counts of the responses to one request to Triton; ``url`` is host:port.

    Raises RuntimeError with the server's text for a status other than 200, or an error in the stream.
    """
    sampling = {"max_tokens": spec.output_len, "ignore_eos": True, "temperature": 0}
    body = {
        "input_ids": spec.prompt,
        "stream": True,
        "sampling_parameters": json.dumps(sampling),
        "exclude_input_in_output": True,
        "return_num_output_tokens": True,
    }
    return await _responses(url, f"/v2/models/{model}/generate_stream", body, tokens_of)


async def complete(url: str, model: str, spec: RequestSpec) -> list[tuple[float, int]]:
    """The same of one request to a gateway for OpenAI's API."""
    body = {
        "model": model,
        "prompt": spec.prompt,
        "max_tokens": spec.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    return await _responses(url, "/v1/completions", body, completion_tokens_of)


def tokens_of(event: bytes) -> int:
    """New tokens that an event of Triton's tells of; raises RuntimeError if it tells of an error."""
    content = _content(event)
    tokens = content["num_output_tokens"]
    return int(tokens[0] if isinstance(tokens, list) else tokens)


def completion_tokens_of(event: bytes) -> int:
    """New tokens that an event of the gateway's tells of; raises RuntimeError as `tokens_of` does."""
    if not event.startswith(b"data: {"):  # a comment, or the mark of the end
        return 0
    return sum(len(choice["token_ids"]) for choice in _content(event)["choices"])


def _content(event: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(event.removeprefix(b"data:"))
    if "error" in content:
        raise RuntimeError(f"the request failed: {content['error']}")
    return content


async def _responses(
    url: str, path: str, body: Mapping[str, Any], count: Callable[[bytes], int]
) -> list[tuple[float, int]]:
    """Times of the events that bring tokens, and how many each brings."""
    host, _, port = url.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_request(host, path, json.dumps(body).encode()))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if " 200 " not in head.split("\r\n", 1)[0]:
            text = (await reader.read()).decode(errors="replace")
            raise RuntimeError(f"the server answered {head.splitlines()[0]}: {text[-500:]}")
        if "transfer-encoding: chunked" not in head:
            raise RuntimeError("the server's stream is not in chunks")
        timed = [(time.perf_counter(), count(event)) async for event in _events(_chunks(reader))]
        return [(at, tokens) for at, tokens in timed if tokens]
    finally:
        writer.close()


def _request(host: str, path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole events; a chunk may hold several of them, or a part of one."""
    pending = b""
    async for chunk in chunks:
        pending += chunk
        *whole, pending = pending.split(_EVENT_END)
        for event in whole:
            yield event
