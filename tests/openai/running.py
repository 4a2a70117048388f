"""A gateway that listens on a port of its own, in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType
from typing import Any

import httpx
import uvicorn
from openai import OpenAI

from tests.cli.command import wait_for
from trident_client.openai.app import create_app
from trident_client.openai.command import server_options
from trident_client.openai.settings import GatewaySettings


class RunningGateway:
    """Started when entered; when left it must end by itself."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.settings = GatewaySettings(url=url, **settings)
        # With its protocol named, as the command has it, small packets leave at once.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(create_app(self.settings), **server_options(self.settings))
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> RunningGateway:
        self._thread.start()
        wait_for(lambda: self._server.started, "the gateway listens")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def open_connections(self) -> int:
        """Connections that have a place in the gateway's memory."""
        return len(self._server.server_state.connections)

    def openai(self, **options: Any) -> OpenAI:
        """OpenAI's own client, which does not repeat requests by itself."""
        return OpenAI(
            base_url=f"{self.url}/v1",
            **{"api_key": "none", "max_retries": 0, "timeout": 60, **options},
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """`body` is sent as JSON, bytes as they are but called JSON."""
        if isinstance(body, bytes):
            headers = {"content-type": "application/json", **options.pop("headers", {})}
            return httpx.post(self.url + path, content=body, headers=headers, timeout=60, **options)
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def connect(self, path: str, body: bytes, headers: str = "") -> socket.socket:
        """A raw connection on which a request has been sent."""
        connection = socket.create_connection(self._socket.getsockname())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        return connection
