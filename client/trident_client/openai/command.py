"""``trident-client openai``: the options of the gateway, and its processes.

With several workers each is a process of its own behind one socket; they share nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from trident_client.openai.settings import ENVIRONMENT, GatewaySettings

__all__ = ["add_arguments", "run", "server_options", "settings_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The gateway's options, beside those of the connection to the server."""
    default = GatewaySettings()
    group = parser.add_argument_group("gateway")
    group.add_argument("--host", default=default.host, help=f"default: {default.host}")
    group.add_argument("--port", type=int, default=default.port, help=f"default: {default.port}")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    group.add_argument(
        "--embed-model", metavar="NAME",
        help="the model that embeds (default: embed, if the server has it)",
    )  # fmt: skip
    group.add_argument(
        "--api-key-file", metavar="FILE",
        help="keys, one a line, of which each request must bring one; the variable "
        "TRIDENT_API_KEYS holds more of them, between commas",
    )  # fmt: skip
    group.add_argument(
        "--max-requests-per-key", type=int, default=0, metavar="N",
        help="requests of a key in flight at a time, in each process (default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--max-tokens-per-minute-per-key", type=int, default=0, metavar="N",
        help="tokens of prompts and outputs of a key, counted as its requests end, in each process "
        "(default: no limit)",
    )  # fmt: skip
    group.add_argument(
        "--max-body-bytes", type=int, default=default.max_body_bytes, metavar="N",
        help=f"default: {default.max_body_bytes}",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="web pages of this origin may ask; any number of times",
    )  # fmt: skip
    group.add_argument(
        "--metrics-url", metavar="URL", help="the server's metrics, passed on at /metrics"
    )
    group.add_argument(
        "--tool-parser", default=default.tool_parser,
        choices=("auto", "off", "hermes", "llama3_json", "pythonic", "mistral"),
        help="how the model writes tool calls (default: auto, which knows each form)",
    )  # fmt: skip
    group.add_argument(
        "--reasoning-parser", default=default.reasoning_parser, choices=("auto", "off", "open"),
        help="auto: a <think> block at the beginning is reasoning; open: the chat template has "
        "opened it already (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--page", action=argparse.BooleanOptionalAction, default=default.page,
        help="a page at / to try the models and to watch the engine (default: yes)",
    )  # fmt: skip
    group.add_argument("--stop-at-eof", action="store_true", help=argparse.SUPPRESS)


def settings_of(arguments: argparse.Namespace) -> GatewaySettings:
    """The options as one object."""
    return GatewaySettings(
        url=arguments.url,
        models=tuple(dict.fromkeys(arguments.model or ("llm",))),
        embed_model=arguments.embed_model,
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        tls=arguments.tls,
        ca=arguments.ca,
        headers=tuple(arguments.header),
        timeout=arguments.timeout,
        metrics_url=arguments.metrics_url,
        api_key_file=arguments.api_key_file,
        cors_origins=tuple(arguments.cors_origin),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
        page=arguments.page,
        max_body_bytes=arguments.max_body_bytes,
        max_requests_per_key=arguments.max_requests_per_key,
        max_tokens_per_minute_per_key=arguments.max_tokens_per_minute_per_key,
        stop_at_eof=arguments.stop_at_eof,
    )


def server_options(settings: GatewaySettings) -> dict[str, Any]:
    """How uvicorn serves, wherever it listens. Raises ImportError without the extra ``openai``."""
    from trident_client.openai.access import MAX_HEADER_BYTES
    from trident_client.openai.connection import Connection

    return {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "lifespan": "on",
        "timeout_keep_alive": settings.idle_timeout,
        "timeout_graceful_shutdown": int(settings.shutdown_timeout),
        "http": Connection,
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
    }


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; gives the exit status."""
    settings = settings_of(arguments)
    try:
        import uvicorn

        from trident_client.openai.app import create_app
    except ImportError as error:
        print(
            f"trident-client: the gateway needs the module {error.name}; "
            "run: pip install 'trident-client[openai]'",
            file=sys.stderr,
        )
        return 1
    try:
        app = create_app(settings)
    except ValueError as error:
        print(f"trident-client: {error}", file=sys.stderr)
        return 1
    options = {**server_options(settings), "host": settings.host, "port": settings.port}
    print(f"listening on http://{settings.host}:{settings.port}", file=sys.stderr, flush=True)
    if settings.workers > 1:
        return _run_workers(settings, options)
    server = uvicorn.Server(uvicorn.Config(app, **options))

    def stop() -> None:
        server.should_exit = True

    _at_eof(settings, stop)
    asyncio.run(server.serve())
    return 0 if server.started else 1


def _run_workers(settings: GatewaySettings, options: dict[str, Any]) -> int:
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    os.environ[ENVIRONMENT] = settings.to_json()
    _at_eof(settings, lambda: os.kill(os.getpid(), signal.SIGTERM))
    config = uvicorn.Config(
        "trident_client.openai.app:from_environment",
        factory=True,
        workers=settings.workers,
        **options,
    )
    bound = config.bind_socket()
    # asyncio lets small packets leave at once only on sockets that say what protocol they have. Else
    # each answer would wait some 40 ms for the caller's acknowledgement of its beginning.
    listening = socket.socket(bound.family, bound.type, socket.IPPROTO_TCP, fileno=bound.detach())
    Multiprocess(config, sockets=[listening]).run()
    return 0


def _at_eof(settings: GatewaySettings, stop: Callable[[], None]) -> None:
    """Calls `stop` once nobody holds the other end of standard input, if that is wanted."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        stop()

    if settings.stop_at_eof:
        threading.Thread(target=wait, daemon=True).start()
