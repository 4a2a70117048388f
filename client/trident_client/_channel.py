"""How a client connects: address, TLS, keepalive, headers, retries.

Owns the connection settings and their translation to gRPC's; knows nothing about requests.
Invariant: the defaults are ones that an unconfigured Triton server accepts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from trident_client.errors import invalid

__all__ = ["TLS", "Keepalive", "RetryPolicy", "Settings"]


@dataclass(frozen=True)
class TLS:
    """TLS settings; all certificates in PEM form. Without `root_certificates` gRPC's own are used.

    `server_name` is the name to check the server's certificate for, where it is not the url's.
    """

    root_certificates: bytes | None = None
    private_key: bytes | None = None
    certificate_chain: bytes | None = None
    server_name: str | None = None


@dataclass(frozen=True)
class Keepalive:
    """Pings that find a dead connection while a request waits; times in seconds.

    A Triton server not configured otherwise closes connections that ping more often than every 300 s
    while it has nothing to send; so lower `interval` only together with the server's
    ``--grpc-http2-min-recv-ping-interval-without-data``.
    """

    interval: float = 330.0
    timeout: float = 20.0
    without_calls: bool = False


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and after how many seconds, a request that got no token yet is tried again.

    >>> policy = RetryPolicy(limit=5, first_delay=1.0, max_delay=3.0)
    >>> [policy.longest_delay(attempt) for attempt in range(3)]
    [1.0, 2.0, 3.0]
    """

    limit: int = 2
    first_delay: float = 0.1
    max_delay: float = 2.0

    def longest_delay(self, attempt: int) -> float:
        """The most to wait before retry `attempt`, counted from 0."""
        # The exponent is bounded so that no limit, however high, overflows a float.
        return min(self.max_delay, self.first_delay * 2.0 ** min(attempt, 60))

    def delay(self, attempt: int) -> float:
        """Spread over the upper half, so that clients refused together do not return together."""
        return self.longest_delay(attempt) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Settings:
    """What a client was made with, checked. `timeout` in seconds, None for no deadline."""

    url: str
    model: str
    model_version: str = ""
    timeout: float | None = None
    ssl: bool | TLS = False
    headers: Mapping[str, str] = field(default_factory=dict)
    keepalive: Keepalive = field(default_factory=Keepalive)
    retries: int | RetryPolicy = 2
    concurrency: int = 64

    def __post_init__(self) -> None:
        if not self.url or ("://" in self.url and not self.url.startswith(("unix:", "dns:"))):
            raise invalid("url", f"must be host:port without a scheme, not {self.url!r}")
        if not self.model:
            raise invalid("model", "must name a model of the server")
        if self.concurrency < 1:
            raise invalid("concurrency", f"must be at least 1, not {self.concurrency}")
        if self.retry.limit < 0:
            raise invalid("retries", f"must be 0 or more, not {self.retry.limit}")
        self.deadline(None)

    @property
    def retry(self) -> RetryPolicy:
        return self.retries if isinstance(self.retries, RetryPolicy) else RetryPolicy(self.retries)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.lower(), value) for name, value in self.headers.items())

    def deadline(self, timeout: float | None) -> float | None:
        """The seconds a call may take: its own `timeout`, else the client's."""
        chosen = self.timeout if timeout is None else timeout
        if chosen is not None and not (chosen > 0 and math.isfinite(chosen)):
            raise invalid("timeout", f"must be a positive number of seconds, not {chosen}")
        return chosen

    def credentials(self) -> grpc.ChannelCredentials | None:
        """gRPC's credentials; None for a connection without TLS."""
        if self.ssl is False:
            return None
        tls = TLS() if self.ssl is True else self.ssl
        return grpc.ssl_channel_credentials(
            tls.root_certificates, tls.private_key, tls.certificate_chain
        )

    def options(self) -> list[tuple[str, str | int]]:
        """gRPC's channel arguments."""
        options: list[tuple[str, str | int]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", round(self.keepalive.interval * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive.timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive.without_calls)),
            # A prefill may take longer than the two pings that are allowed by default.
            ("grpc.http2.max_pings_without_data", 0),
            # A server that restarted is found again within seconds; the default is two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Two clients of one server share neither a connection nor its troubles.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if isinstance(self.ssl, TLS) and self.ssl.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.ssl.server_name))
        return options
