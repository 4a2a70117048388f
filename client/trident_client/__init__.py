"""A typed streaming client for LLMs served by NVIDIA Triton Inference Server.

Works with Trident and, for what it has, with vllm_backend. Owns the public names; everything that
does not begin with an underscore here is supported.

>>> from trident_client import Client
>>> with Client(url) as client:
...     for delta in client.stream("Hello", max_tokens=8):
...         print(delta.text, end="|")
Hel|lo th|ere|
"""

from trident_client._channel import TLS, Keepalive, RetryPolicy
from trident_client._request_ids import request_id
from trident_client.aio import AsyncClient, AsyncStream
from trident_client.client import Client, Stream
from trident_client.errors import (
    AccessDenied,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ServerError,
    StreamInterrupted,
    TridentError,
    Unavailable,
    UnsupportedFeature,
)
from trident_client.results import (
    Choice,
    Delta,
    Embeddings,
    Logprob,
    ModelInfo,
    Result,
    Times,
    Usage,
)

__all__ = [
    "TLS",
    "AccessDenied",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Delta",
    "Embeddings",
    "InvalidArgument",
    "Keepalive",
    "Logprob",
    "ModelInfo",
    "NotFound",
    "Result",
    "RetryPolicy",
    "ServerError",
    "Stream",
    "StreamInterrupted",
    "Times",
    "TridentError",
    "Unavailable",
    "UnsupportedFeature",
    "Usage",
    "request_id",
]
