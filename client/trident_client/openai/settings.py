"""What a gateway was started with. Travels to worker processes as JSON in the environment."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from trident_client import TLS

__all__ = ["ENVIRONMENT", "GatewaySettings"]

ENVIRONMENT = "TRIDENT_OPENAI_SETTINGS"


@dataclass(frozen=True)
class GatewaySettings:
    """All times in seconds, all sizes in bytes. Keys are not in here, only where they are."""

    url: str = "localhost:8001"
    models: tuple[str, ...] = ("llm",)
    embed_model: str | None = None  # None: "embed", if the server has it
    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 1
    tls: bool = False
    ca: str | None = None  # file of root certificates
    headers: tuple[tuple[str, str], ...] = ()  # sent to the server with each request
    timeout: float | None = None  # deadline of a request
    metrics_url: str | None = None  # the server's own metrics
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    page: bool = True  # whether there is something to look at under "/"
    max_body_bytes: int = 4 * 2**20
    max_requests_per_key: int = 0  # in flight; 0: no limit
    max_tokens_per_minute_per_key: int = 0  # of prompts and outputs; 0: no limit
    max_unread_bytes: int = 2**20  # of one request, beyond what is in the connection's own buffers
    write_timeout: float = 60.0
    idle_timeout: float = 30.0  # of a connection that sends no whole head, or does not read
    heartbeat: float = 10.0
    shutdown_timeout: float = 30.0
    stop_at_eof: bool = False  # end when standard input does: its other end is who started us

    def to_json(self) -> str:
        """A text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GatewaySettings:
        """What `to_json` wrote."""
        values = json.loads(text)
        for name in ("models", "cors_origins"):
            values[name] = tuple(values[name])
        values["headers"] = tuple((name, value) for name, value in values["headers"])
        return cls(**values)

    def ssl(self) -> bool | TLS:
        """How to connect to the server, in the client's terms."""
        if self.ca is not None:
            return TLS(root_certificates=Path(self.ca).read_bytes())
        return self.tls
