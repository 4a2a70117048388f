"""The command ``trident``: parses the command line and turns errors into a sentence and a status.

Exit status 1 is an error with one sentence on standard error, 2 a command line that cannot be parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from trident_llm import __version__
from trident_llm.cli.console import Console
from trident_llm.cli.errors import CommandError, describe
from trident_llm.cli.options import add_serve_options, serve_options
from trident_llm.cli.serve import serve
from trident_llm.cli.stop_signals import StopSignals

_SERVE_DESCRIPTION = """\
Starts Triton server with a model that this engine runs, shows how far it is, streams a first answer
and serves until Ctrl-C. Requests in flight are then finished, and nothing is left behind."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="trident",
        description="An LLM inference engine that runs inside NVIDIA Triton Inference Server.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trident {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve_parser = commands.add_parser(
        "serve",
        help="start Triton server with a model",
        description=_SERVE_DESCRIPTION,
        allow_abbrev=False,
    )
    add_serve_options(serve_parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parsed = build_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every character
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not parsed.verbose
    console = Console(sys.stdout, sys.stderr, live)
    with StopSignals() as stop:
        try:
            status = serve(serve_options(parsed), console, stop)
        except (CommandError, OSError) as error:
            console.drop_phase()
            console.error(describe(error) if isinstance(error, OSError) else str(error))
            status = 1
    _forget_broken_output()
    return status


def _forget_broken_output() -> None:
    """At exit Python flushes standard output, and fails if its reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
