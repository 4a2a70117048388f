"""``GET /metrics``: the gateway's own counts, with those of the model server passed on.

The counts are this process's; several processes are scraped each by itself.
"""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections import Counter

__all__ = ["PATHS", "GatewayMetrics"]

PATHS = frozenset(
    (
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models",
        "/tokenize", "/detokenize", "/health", "/health/ready", "/version", "/metrics",
        "/stats", "/", "/openapi.json",
    )
)  # fmt: skip
"""Paths that are counted under their names; others are "other", so that nobody can add to them."""

_TIMEOUT = 5.0


class GatewayMetrics:
    """Counters of one process."""

    def __init__(self, metrics_url: str | None) -> None:
        self._metrics_url = metrics_url
        self._in_flight = 0
        self._ended: Counter[tuple[str, str]] = Counter()

    def began(self) -> None:
        """A request arrived."""
        self._in_flight += 1

    def ended(self, path: str, status: str) -> None:
        """A request is over; `status` is HTTP's, or a word for a stream that did not end well."""
        self._in_flight -= 1
        self._ended[path if path in PATHS else "other", status] += 1

    async def text(self) -> str:
        """All counts in the format of Prometheus."""
        return self._own() + await asyncio.to_thread(self._server)

    def _own(self) -> str:
        lines = [
            "# HELP trident_gateway_requests_total Requests that are over, by endpoint and status.",
            "# TYPE trident_gateway_requests_total counter",
            *(
                f'trident_gateway_requests_total{{endpoint="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._ended.items())
            ),
            "# HELP trident_gateway_requests_in_flight Requests that are not over.",
            "# TYPE trident_gateway_requests_in_flight gauge",
            f"trident_gateway_requests_in_flight {self._in_flight}",
            "# HELP trident_gateway_server_metrics_up Whether the model server's metrics follow.",
            "# TYPE trident_gateway_server_metrics_up gauge",
        ]
        return "\n".join(lines) + "\n"

    def _server(self) -> str:
        text = ""
        if self._metrics_url is not None:
            try:
                with urllib.request.urlopen(self._metrics_url, timeout=_TIMEOUT) as response:
                    text = response.read().decode()
            except (OSError, ValueError):
                text = ""
        return f"trident_gateway_server_metrics_up {int(bool(text))}\n{text}"
