"""One request over HTTP: ``POST /v2/models/M/generate_stream`` and its server-sent events.

Owns as much of HTTP/1.1 as this needs, so that the benchmark's own cost stays small and no HTTP
library is needed. Invariant: a response is timed when its last byte has come.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from perf.workloads import RequestSpec

_EVENT_END = b"\n\n"


async def generate(url: str, model: str, spec: RequestSpec) -> list[tuple[float, int]]:
    """Times and token counts of the responses to one request; ``url`` is host:port.

    Raises RuntimeError with the server's text for a status other than 200, or an error in the stream.
    """
    host, _, port = url.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_request(host, model, spec))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if " 200 " not in head.split("\r\n", 1)[0]:
            text = (await reader.read()).decode(errors="replace")
            raise RuntimeError(f"the server answered {head.splitlines()[0]}: {text[-500:]}")
        if "transfer-encoding: chunked" not in head:
            raise RuntimeError("the server's stream is not in chunks")
        return [(time.perf_counter(), tokens_of(event)) async for event in _events(_chunks(reader))]
    finally:
        writer.close()


def tokens_of(event: bytes) -> int:
    """New tokens that an event tells of; raises RuntimeError if it tells of an error."""
    content = json.loads(event.removeprefix(b"data:"))
    if "error" in content:
        raise RuntimeError(f"the request failed: {content['error']}")
    tokens = content["num_output_tokens"]
    return int(tokens[0] if isinstance(tokens, list) else tokens)


def _request(host: str, model: str, spec: RequestSpec) -> bytes:
    sampling = {"max_tokens": spec.output_len, "ignore_eos": True, "temperature": 0}
    body = json.dumps({
        "input_ids": spec.prompt,
        "stream": True,
        "sampling_parameters": json.dumps(sampling),
        "exclude_input_in_output": True,
        "return_num_output_tokens": True,
    }).encode()  # fmt: skip
    head = (
        f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: {host}\r\n"
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
