"""The command line of ``trident serve``: its own options, and one per setting of the engine.

Invariant: the engine's options are made from the fields of :class:`EngineConfig`, so a setting that
exists there is an option here, and an option that was not given leaves the setting's default alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from trident_llm.cli.errors import CommandError
from trident_llm.core.config import EngineConfig, setting_help

EMBEDDING_MODEL_NAME = "embed"

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

# Where the help shows a setting; one that is not listed stands under "other engine settings".
_GROUPS: Mapping[str, Sequence[str]] = {
    "model": (
        "model", "tokenizer", "device", "dtype", "quantization", "max_model_len",
        "generation_config", "seed", "num_threads", "tensor_parallel_size",
    ),
    "KV cache": (
        "block_size", "num_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization",
        "enable_prefix_caching",
    ),
    "scheduling": (
        "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "max_waiting",
        "admission", "scheduling_policy", "launch_depth",
    ),
}  # fmt: skip
_OTHER_GROUP = "other engine settings"


@dataclass(frozen=True)
class ServeOptions:
    """What ``trident serve`` was asked to do."""

    model: str | None  # None: the default model
    model_name: str
    http_port: int
    grpc_port: int
    metrics_port: int
    openai_port: int | None  # None: no OpenAI-compatible gateway
    openai_args: tuple[str, ...]  # further options of the gateway
    model_control_mode: Literal["none", "explicit"]
    model_repository: Path | None  # a repository to serve as it is
    tritonserver: Path | None
    log_file: Path | None
    verbose: bool
    self_check: bool
    engine_settings: Mapping[str, Any]  # only those that were given, without the model
    embedding_model: str | None  # a folder or "default"; None: no model that embeds
    embedding_settings: Mapping[str, Any]  # of that model's engine

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the server must have ready."""
        embeds = self.embedding_model is not None
        return (self.model_name, EMBEDDING_MODEL_NAME) if embeds else (self.model_name,)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Adds every option of ``trident serve`` to ``parser``, in groups."""
    hints, helps = get_type_hints(EngineConfig), setting_help()
    listed = {name for names in _GROUPS.values() for name in names}
    others = tuple(name for name in hints if name not in listed)
    for title, names in {**_GROUPS, _OTHER_GROUP: others}.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_setting(group, name, hints[name], helps[name])
    _add_server_options(parser.add_argument_group("server"))


def serve_options(arguments: argparse.Namespace) -> ServeOptions:
    """The parsed command line as one object.

    Raises :class:`CommandError` where options contradict each other.
    """
    settings = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(EngineConfig)
        if field.name != "model" and getattr(arguments, field.name) is not None
    }
    ports = [arguments.http_port, arguments.grpc_port, arguments.metrics_port]
    if arguments.openai_port is not None:
        ports.append(arguments.openai_port)
    if len(set(ports)) < len(ports):
        raise CommandError("--http-port, --grpc-port, --metrics-port and --openai-port must differ")
    if arguments.openai_args and arguments.openai_port is None:
        raise CommandError("--openai-args needs --openai-port")
    given = [*(["model"] if arguments.model is not None else []), *settings]
    if arguments.model_repository is not None and given:
        options = ", ".join(_option(name) for name in given)
        raise CommandError(
            f"{options} cannot be combined with --model-repository: a repository is served as it "
            "is; write the settings into its 1/model.json"
        )
    embedding_model = None if arguments.embedding_model == "none" else arguments.embedding_model
    _check_embedding(arguments, embedding_model)
    return ServeOptions(
        model=arguments.model,
        model_name=arguments.model_name,
        http_port=arguments.http_port,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.metrics_port,
        openai_port=arguments.openai_port,
        openai_args=tuple(shlex.split(arguments.openai_args)),
        model_control_mode=arguments.model_control_mode,
        model_repository=arguments.model_repository,
        tritonserver=arguments.tritonserver,
        log_file=arguments.log_file,
        verbose=arguments.verbose,
        self_check=arguments.self_check,
        engine_settings=settings,
        embedding_model=embedding_model,
        embedding_settings=arguments.embedding_settings,
    )


def _check_embedding(arguments: argparse.Namespace, embedding_model: str | None) -> None:
    if embedding_model is None:
        if arguments.embedding_settings:
            raise CommandError("--embedding-settings needs --embedding-model")
        return
    if arguments.model_repository is not None:
        raise CommandError(
            "--embedding-model cannot be combined with --model-repository: a repository is served as "
            "it is"
        )
    if arguments.model_name == EMBEDDING_MODEL_NAME:
        raise CommandError(
            f"--model-name must not be {EMBEDDING_MODEL_NAME}, which is the name of the model that "
            "embeds"
        )


def _add_server_options(group: Any) -> None:
    group.add_argument(
        "--model-name", type=_model_name, default="llm", metavar="NAME",
        help="name under which the model is served (default: llm)",
    )  # fmt: skip
    for name, label, port in (
        ("http", "HTTP", 8000), ("grpc", "gRPC", 8001), ("metrics", "metrics", 8002),
    ):  # fmt: skip
        group.add_argument(
            f"--{name}-port", type=_port, default=port, metavar="N",
            help=f"port of the server's {label} endpoint (default: {port})",
        )  # fmt: skip
    group.add_argument(
        "--openai-port", type=_port, metavar="N",
        help="serve OpenAI's HTTP API on this port too (default: no)",
    )  # fmt: skip
    group.add_argument(
        "--embedding-model", default="none", metavar="DIR",
        help=f"serve a model that embeds too, under the name {EMBEDDING_MODEL_NAME}: its folder, or "
        '"default" for all-MiniLM-L6-v2, fetched once (default: none)',
    )  # fmt: skip
    group.add_argument(
        "--embedding-settings", type=_json_object, default={}, metavar="JSON",
        help='settings of that model\'s engine, as a JSON object: {"max_num_seqs": 8}',
    )  # fmt: skip
    group.add_argument(
        "--openai-args", default="", metavar="ARGS",
        help="further options of `trident-client openai`, as one text",
    )  # fmt: skip
    group.add_argument(
        "--model-control-mode", choices=("none", "explicit"), default="none",
        help="explicit: clients may load and unload models, also models of their own, which is "
        "code that runs here; only where all clients are trusted (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--model-repository", type=Path, metavar="DIR",
        help="serve this model repository as it is, instead of one made from the engine's settings",
    )  # fmt: skip
    group.add_argument(
        "--tritonserver", type=Path, metavar="PATH",
        help="the server's binary (default: the one on PATH, else the one of the Python package "
        "nvidia-pytriton)",
    )  # fmt: skip
    group.add_argument(
        "--log-file", type=Path, metavar="PATH",
        help="append the server's log to this file (default: a temporary file, gone at the end)",
    )  # fmt: skip
    group.add_argument(
        "--verbose", action="store_true", help="show the server's log on standard error"
    )
    group.add_argument(
        "--self-check", action=argparse.BooleanOptionalAction, default=True,
        help="stream a first answer to the terminal once the server is ready (default: yes)",
    )  # fmt: skip


def _add_setting(group: Any, name: str, hint: Any, text: str) -> None:
    """One engine setting as an option. Its default is None: not given."""
    default = EngineConfig.__dataclass_fields__[name].default
    if default not in (None, ""):
        shown = ("no", "yes")[default] if isinstance(default, bool) else default
        text = f"{text} (default: {shown})"
    if name == "model":
        text += " (default: SmolLM2-135M-Instruct, fetched once)"
    text = text.replace("%", "%%")
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    literal = next((part for part in (hint, kind) if get_origin(part) is Literal), None)
    if literal is not None:
        group.add_argument(_option(name), choices=get_args(literal), help=text)
    elif kind is bool:
        group.add_argument(
            _option(name), action=argparse.BooleanOptionalAction, default=None, help=text
        )
    else:
        metavar = {int: "N", float: "X", str: "DIR" if name in ("model", "tokenizer") else "NAME"}
        group.add_argument(_option(name), type=kind, metavar=metavar[kind], help=text)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port between 1 and 65535, not {text!r}")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _model_name(text: str) -> str:
    if not _MODEL_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"may hold letters, digits, '.', '_' and '-' and begins with a letter or digit, not {text!r}"
        )
    return text
