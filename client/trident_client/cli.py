"""The command `trident-client`: complete, chat, health, bench, openai.

Owns the arguments, the terminal and the exit status; all else is the client's. Invariants: what the
model writes goes to stdout and nothing else does, save bench's report; Ctrl-C cancels the request
on the server and exits 130; an error is one line on stderr and exits 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trident_client._channel import TLS
from trident_client.bench import Workload, report, run
from trident_client.client import Client, Stream
from trident_client.errors import TridentError
from trident_client.openai import command as openai_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader left; keep the interpreter's own flush at exit from failing as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TridentError, OSError) as error:
        if _interrupt.taken:
            return 130
        print(f"trident-client: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


class _Interrupt:
    """Ctrl-C: cancels what is streaming and raises KeyboardInterrupt.

    Python drops the exception where it cannot be passed on, such as in a finalizer that happens to
    run; the cancelled stream then ends the command all the same.
    """

    def __init__(self) -> None:
        self.taken = False
        self._stream: Stream | None = None

    def watch(self, stream: Stream) -> None:
        """From here on Ctrl-C ends this stream."""
        self._stream = stream
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._take)

    def _take(self, number: int, frame: object) -> None:
        self.taken = True
        if self._stream is not None:
            self._stream.cancel()
        raise KeyboardInterrupt


_interrupt = _Interrupt()


def _parser() -> argparse.ArgumentParser:
    connection = argparse.ArgumentParser(add_help=False)
    server = connection.add_argument_group("server")
    server.add_argument("--url", default="localhost:8001", help="host:port of the gRPC endpoint")
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="deadline of a request")
    server.add_argument("--tls", action="store_true", help="connect with TLS")
    server.add_argument("--ca", metavar="FILE", help="root certificates in PEM form; implies --tls")
    server.add_argument("--header", action="append", default=[], type=_header, metavar="NAME:VALUE")
    common = argparse.ArgumentParser(add_help=False, parents=[connection])
    common.add_argument("--model", default="llm")
    sampling = argparse.ArgumentParser(add_help=False)
    group = sampling.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256)
    group.add_argument("--temperature", type=float)
    group.add_argument("--seed", type=int)
    group.add_argument(
        "-p",
        "--param",
        action="append",
        default=[],
        type=_param,
        metavar="KEY=VALUE",
        help="any other sampling parameter; VALUE is JSON, or a text",
    )

    parser = argparse.ArgumentParser("trident-client", description="Talk to a served LLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "complete", parents=[common, sampling], help="continue a text, streaming"
    )
    command.add_argument("prompt", nargs="?", help="read from stdin if absent")
    command.set_defaults(run=_complete)

    command = commands.add_parser(
        "chat", parents=[common, sampling], help="answer a message, or talk line by line"
    )
    command.add_argument(
        "message", nargs="?", help="lines from stdin, answered one by one, if absent"
    )
    command.add_argument("--system", help="system message")
    command.set_defaults(run=_chat)

    command = commands.add_parser("health", parents=[common], help="exit 0 if ready, else 1")
    command.set_defaults(run=_health)

    command = commands.add_parser("bench", parents=[common], help="load the server and time it")
    command.add_argument(
        "--concurrency", type=_count, default=8, help="requests under way at a time"
    )
    command.add_argument("--requests", type=_count, default=64, help="requests in all")
    command.add_argument("--prompt-tokens", type=_count, default=128)
    command.add_argument("--output-tokens", type=_count, default=64)
    command.set_defaults(run=_bench)

    command = commands.add_parser(
        "openai", parents=[connection], help="serve OpenAI's HTTP API in front of the server"
    )
    command.add_argument(
        "--model", action="append", help="a model to serve, any number of times (default: llm)"
    )
    openai_command.add_arguments(command)
    command.set_defaults(run=_openai)
    return parser


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"must be NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()


def _param(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, not {text!r}")
    return int(text)


def _tls(arguments: argparse.Namespace) -> bool | TLS:
    if arguments.ca is not None:
        return TLS(root_certificates=Path(arguments.ca).read_bytes())
    return bool(arguments.tls)


def _client(arguments: argparse.Namespace) -> Client:
    return Client(
        arguments.url,
        arguments.model,
        timeout=arguments.timeout,
        ssl=_tls(arguments),
        headers=dict(arguments.header),
    )


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        **dict(arguments.param),
    }


def _show(stream: Stream) -> str:
    """Print the first sequence as it comes; gives its whole text."""
    _interrupt.watch(stream)
    with stream:
        texts = []
        for delta in stream:
            if delta.index == 0:
                texts.append(delta.text)
                print(delta.text, end="", flush=True)
        print(flush=True)
        return "".join(texts)


def _complete(arguments: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    with _client(arguments) as client:
        _show(client.stream(prompt, **_sampling(arguments)))
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    messages = [] if arguments.system is None else [_message("system", arguments.system)]
    with _client(arguments) as client:
        if arguments.message is not None:
            messages.append(_message("user", arguments.message))
            _show(client.chat(messages, stream=True, **_sampling(arguments)))
            return 0
        while (line := _ask()) is not None:
            messages.append(_message("user", line))
            answer = _show(client.chat(messages, stream=True, **_sampling(arguments)))
            messages.append(_message("assistant", answer))
    return 0


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _ask() -> str | None:
    """The next line of the user that is not blank; None at the end of input."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.rstrip("\n")


def _health(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        wait = arguments.timeout or 5.0
        live, ready = client.is_live(timeout=wait), client.is_ready(timeout=wait)
    print(f"{arguments.url}: {'live' if live else 'not live'}")
    print(f"{arguments.model}: {'ready' if ready else 'not ready'}")
    return 0 if ready else 1


def _bench(arguments: argparse.Namespace) -> int:
    workload = Workload(
        arguments.concurrency,
        arguments.requests,
        arguments.prompt_tokens,
        arguments.output_tokens,
    )
    outcome = asyncio.run(
        run(
            workload,
            url=arguments.url,
            model=arguments.model,
            timeout=arguments.timeout,
            ssl=_tls(arguments),
            headers=dict(arguments.header),
        )
    )
    print(report(outcome))
    print(json.dumps(outcome))
    return 1 if outcome["errors"] else 0


def _openai(arguments: argparse.Namespace) -> int:
    return openai_command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
