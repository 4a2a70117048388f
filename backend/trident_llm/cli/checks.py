"""Looks before the start for what would make it fail: folder, memory, ports, files, shared memory.

Knows model folders by their config and the machine by :mod:`trident_llm.core.machine`; it imports no
torch. Each mistake is one :class:`CommandError`. What passes here may still fail in the server, which
reads the weights; what is refused here could never have worked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trident_llm.cli.errors import CommandError
from trident_llm.core.config import EngineConfig, parse_engine_config
from trident_llm.core.embedding import parse_embedding_config
from trident_llm.core.errors import ConfigError
from trident_llm.core.machine import available_memory, format_bytes
from trident_llm.model.config import ModelConfig, read_json, weight_bytes

# What a process with torch, the tokenizer and the server holds before any weight is loaded.
_RUNTIME_BYTES = 400 * 2**20
# The server and the model's process hold some 90 before the first connection; each of those is one more.
_OPEN_FILES = 256
_WANTED_OPEN_FILES = 65536
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_BYTES = 64 * 2**20
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


def check_settings(settings: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration of ``settings``; refuses values out of range."""
    try:
        return parse_engine_config(settings)[0]
    except ConfigError as error:
        raise CommandError(str(error)) from None


def check_model(folder: str, config: EngineConfig) -> Path:
    """The absolute path of a model that can be read and whose weights fit into memory."""
    path = Path(folder).expanduser().absolute()
    if not path.exists():
        raise CommandError(
            f"{path} does not exist; --model names a Hugging Face model folder or a .gguf file here"
        )
    try:
        model = ModelConfig.from_folder(path)
    except (ConfigError, OSError) as error:
        text = str(error)
        raise CommandError(text if str(path) in text else f"{path}: {text}") from None
    if config.device == "cpu" or (config.device == "auto" and not _GPU_DRIVER.exists()):
        _check_memory(model, config)
    return path


def check_embedding_model(folder: str, settings: Mapping[str, Any]) -> Path:
    """The absolute path of a model that embeds and whose files and ``settings`` can be read."""
    # Imported here: most starts have no such model.
    from trident_llm.model.encoder_config import EncoderConfig, is_encoder
    from trident_llm.model.pooling_config import PoolingConfig

    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise CommandError(
            f"{path} is no folder; --embedding-model names a Hugging Face model folder here"
        )
    try:
        config = parse_embedding_config({**settings, "model": str(path)})[0]
        PoolingConfig.from_folder(path, config.pooling)
        if is_encoder(path):
            EncoderConfig.from_dict(read_json(path / "config.json"))
    except (ConfigError, OSError) as error:
        text = str(error)
        raise CommandError(text if str(path) in text else f"{path}: {text}") from None
    return path


def check_ports(ports: Mapping[str, int]) -> None:
    """Refuses a port that the server could not listen on; ``ports`` by the name of their option."""
    for option, port in ports.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the server does: ports of connections that just ended are free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
                # Two sockets may be bound to one port as long as neither listens.
                probe.listen(1)
            except OSError as error:
                reason = (
                    "is in use"
                    if error.errno == errno.EADDRINUSE
                    else f"cannot be used: {error.strerror}"
                )
                raise CommandError(
                    f"port {port} {reason}; stop what listens there or choose another with {option}"
                ) from None


def raise_open_files_limit() -> None:
    """Allows this process and those it starts many open files, if it may; refuses too few."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = most != resource.RLIM_INFINITY
    if bounded and most < _OPEN_FILES:
        raise CommandError(
            f"only {most} files may be open at once, and the server needs {_OPEN_FILES} or more, one "
            "of them for each connection; raise the limit (ulimit -n, docker run --ulimit nofile=...)"
        )
    wanted = min(_WANTED_OPEN_FILES, most) if bounded else _WANTED_OPEN_FILES
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def shared_memory_warning() -> str | None:
    """A warning if there is little shared memory, through which requests and tokens travel."""
    with contextlib.suppress(OSError):
        status = os.statvfs(_SHARED_MEMORY)
        free = status.f_bavail * status.f_frsize
        if free < _SHARED_MEMORY_BYTES:
            return (
                f"only {format_bytes(free)} of shared memory are free in {_SHARED_MEMORY}, and many "
                "requests at once may fail; give it 64 MiB or more (docker run --shm-size=1g)"
            )
    return None


def _check_memory(model: ModelConfig, config: EngineConfig) -> None:
    # With "auto" the device may choose float32; two bytes are the least it can be.
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    weights, pool = weight_bytes(model, dtype), config.kv_cache_memory_bytes or 0
    available = available_memory()
    if weights + pool + _RUNTIME_BYTES > available:
        parts = f"{format_bytes(weights)} for its weights in {dtype}"
        if pool:
            parts += f", {format_bytes(pool)} for the KV pool"
        raise CommandError(
            f"too little memory: the model needs {parts} and {format_bytes(_RUNTIME_BYTES)} besides, "
            f"but {format_bytes(available)} are available; choose a smaller model"
            + (", a smaller KV pool" if pool else "")
            + " or free memory"
        )
