"""``trident serve``: from a model folder to a server that answers, and back to nothing.

Owns the order of things: check, fetch, lay out, start, follow, self-check, watch, stop. Invariants:
whatever ends it (a signal at any moment, a model that does not load, a server that dies), the server
is gone, its shared memory and the run directory are removed; and it tells why in one sentence.

Exit status: 0 after a stop by signal once the server was ready, 128 + N after signal N before that,
1 after an error.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from trident_llm.cli import checks
from trident_llm.cli.console import Console
from trident_llm.cli.errors import CommandError
from trident_llm.cli.gateway_process import check_gateway
from trident_llm.cli.options import EMBEDDING_MODEL_NAME, ServeOptions
from trident_llm.cli.repository import check_repository, drain_seconds, write_repository
from trident_llm.cli.server_process import ServerSettings
from trident_llm.cli.server_run import ServerRun
from trident_llm.cli.stop_signals import StopRequested, StopSignals
from trident_llm.cli.triton_server import find_tritonserver, prepare_server
from trident_llm.core.config import DEFAULT_EMBEDDING_MODEL, DEFAULT_MODEL
from trident_llm.core.embedding import parse_embedding_config


def serve(options: ServeOptions, console: Console, stop: StopSignals) -> int:
    """Serves until a signal arrives; returns the exit status. Raises :class:`CommandError`."""
    began = time.monotonic()
    ports = {
        "--http-port": options.http_port,
        "--grpc-port": options.grpc_port,
        "--metrics-port": options.metrics_port,
    }
    if options.openai_port is not None:
        check_gateway()
        ports["--openai-port"] = options.openai_port
    checks.check_ports(ports)
    checks.raise_open_files_limit()
    binary = find_tritonserver(options.tritonserver)
    checks.check_settings(options.engine_settings)
    run_directory = Path(tempfile.mkdtemp(prefix=f"trident-{os.getpid()}-"))
    run: ServerRun | None = None
    if len(options.models) > 1:  # phases bear the names of their models
        console.name_width = 16
    status = 0
    try:
        repository, drain = _repository(options, run_directory, console, stop)
        settings = _server_settings(options, run_directory, repository, drain)
        server = prepare_server(binary, run_directory)
        stop.check()
        if (warning := checks.shared_memory_warning()) is not None:
            console.warn(warning)
        run = ServerRun(options, server, settings, console, stop, began)
        run.serve()
    except (StopRequested, CommandError):
        # A signal in the terminal also reaches programs that we run, whose failure is no news then.
        if stop.received is None:
            raise
        console.drop_phase()
        status = 0 if run is not None and run.was_ready else 128 + stop.received
    finally:
        try:
            clean = run is None or run.stop_server()
        finally:
            shutil.rmtree(run_directory, ignore_errors=True)
    console.line("stopped")
    return status if clean else 1


def _repository(
    options: ServeOptions, run_directory: Path, console: Console, stop: StopSignals
) -> tuple[Path, float]:
    """The model repository to serve, and how many seconds its model lets requests finish."""
    if options.model_repository is not None:
        repository = check_repository(options.model_repository, options.model_name)
        return repository, drain_seconds(repository, options.model_name)
    model = options.model
    if model is None:
        model = _default_model(DEFAULT_MODEL, "model", console, stop)
    settings = {"model": model, **options.engine_settings}
    config = checks.check_settings(settings)
    settings["model"] = str(checks.check_model(model, config))
    if config.tokenizer is not None:
        settings["tokenizer"] = str(Path(config.tokenizer).expanduser().absolute())
    repository = run_directory / "models"
    write_repository(repository, options.model_name, settings)
    drain = config.drain_seconds
    if options.embedding_model is not None:
        embedding_settings = _embedding_settings(options, options.embedding_model, console, stop)
        write_repository(repository, EMBEDDING_MODEL_NAME, embedding_settings, template="embed")
        drain = max(drain, parse_embedding_config(embedding_settings)[0].drain_seconds)
    return repository, drain


def _embedding_settings(
    options: ServeOptions, model: str, console: Console, stop: StopSignals
) -> dict[str, Any]:
    """What the model.json of the model that embeds holds."""
    if model == "default":
        try:
            model = _default_model(DEFAULT_EMBEDDING_MODEL, "embed model", console, stop)
        except CommandError as error:
            raise CommandError(f"{error}; --embedding-model none serves without it") from None
    settings = options.embedding_settings
    return {**settings, "model": str(checks.check_embedding_model(model, settings))}


def _default_model(name: str, phase: str, console: Console, stop: StopSignals) -> str:
    """The folder of the default model ``name``, fetched and made the first time."""
    from trident_llm.model.config import ModelConfigError
    from trident_llm.model.default_model import DEFAULT_MODELS, default_home, fetch_model

    def progress(what: str, done: int, total: int) -> None:
        if what == "download" and done == 0:
            console.line(f"fetching the default model, {DEFAULT_MODELS[name].title}; done once")
        else:
            console.count(done, total)

    console.begin_phase(phase)
    try:
        with stop.interruptible():
            folder = fetch_model(name, default_home(), progress)
    except (ModelConfigError, OSError) as error:
        raise CommandError(str(error)) from None
    console.end_phase()
    return str(folder)


def _server_settings(
    options: ServeOptions, run_directory: Path, repository: Path, drain: float
) -> ServerSettings:
    log_file = run_directory / "server.log"
    if options.log_file is not None:
        log_file = options.log_file.expanduser().absolute()
        try:
            log_file.open("ab").close()
        except OSError as error:
            raise CommandError(f"{log_file} cannot be written: {error.strerror}") from None
    return ServerSettings(
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        model_control_mode=options.model_control_mode,
        repository=repository,
        complete_config=options.model_repository is None,
        run_directory=run_directory,
        log_file=log_file,
        drain_seconds=drain,
        # With a random part, since containers may share /dev/shm and have the same process ids.
        shm_prefix=f"trident_{os.getpid()}_{secrets.token_hex(4)}_",
    )
