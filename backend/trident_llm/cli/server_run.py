"""One run of the server, through its restarts: start, follow, self-check, watch, stop.

Knows what the model's progress events and the server's state mean; how the server is found and
started is decided elsewhere. Invariant: after :meth:`ServerRun.stop_server` no server of this run is
left.
"""

from __future__ import annotations

import json
import signal
import time
from collections import deque

from trident_llm.cli.console import Console
from trident_llm.cli.errors import CommandError
from trident_llm.cli.gateway_process import GatewayProcess
from trident_llm.cli.http_check import (
    AnswerError,
    gateway_is_up,
    model_is_ready,
    stream_answer,
)
from trident_llm.cli.line_tail import LineTail
from trident_llm.cli.options import ServeOptions
from trident_llm.cli.server_process import (
    ServerProcess,
    ServerSettings,
    log_tail,
    reason_in_log,
)
from trident_llm.cli.stop_signals import StopSignals
from trident_llm.cli.triton_server import TritonServer
from trident_llm.cli.usage import usage_lines

_QUESTION = "What is the capital of France? Answer in one sentence."
_ANSWER_TOKENS = 48
_MAX_RESTARTS = 3
_RESTART_WINDOW_SECONDS = 300.0
_HEALTH_SECONDS = 1.0


class RestartBudget:
    """At most ``limit`` restarts within ``window`` seconds."""

    def __init__(self, limit: int, window: float) -> None:
        self._limit = limit
        self._window = window
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more is allowed at time ``now``; if so, it counts."""
        while self._taken and self._taken[0] <= now - self._window:
            self._taken.popleft()
        if len(self._taken) >= self._limit:
            return False
        self._taken.append(now)
        return True


class _ServerFailed(Exception):
    """The server died, or the model in it; the text says what happened."""


class ServerRun:
    """The server through its starts, and what is told about it."""

    def __init__(
        self,
        options: ServeOptions,
        server: TritonServer,
        settings: ServerSettings,
        console: Console,
        stop: StopSignals,
        began: float,
    ) -> None:
        self._options = options
        self._server = server
        self._settings = settings
        self._console = console
        self._stop = stop
        self._began = began
        self._process: ServerProcess | None = None
        self._progress = LineTail(settings.progress_file)
        self._log = LineTail(settings.log_file)
        self._loading: dict[str, str] = {}  # by model: the phase that has begun and not ended
        self._error: str | None = None  # the model's own word for why it failed
        self._error_in_load = False  # it failed while it was loaded
        self._gateway: GatewayProcess | None = None
        self._gateway_budget = RestartBudget(_MAX_RESTARTS, _RESTART_WINDOW_SECONDS)
        self.was_ready = False

    def serve(self) -> None:
        """Starts the server, and again when it fails; ends by an exception only."""
        self._start()
        if self._options.openai_port is not None:  # it starts while the model loads
            self._gateway = GatewayProcess(self._options, self._settings.log_file)
        self._follow_until_ready()
        if self._options.openai_port is not None:
            self._follow_gateway(self._options.openai_port)
        self.was_ready = True
        self._console.line(f"ready after {time.monotonic() - self._began:.1f} s")
        if self._options.self_check:
            self._check_answer()
        for line in usage_lines(self._options):
            self._console.line(line)
        budget = RestartBudget(_MAX_RESTARTS, _RESTART_WINDOW_SECONDS)
        while True:
            try:
                self._watch()
            except _ServerFailed as error:
                self._restart(error, budget)

    def stop_server(self) -> bool:
        """Ends the server, if there is one; whether it left as it should. Signals do not cut this."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.begin_stop()
        try:
            return self._stop_process()
        finally:
            if gateway is not None:
                gateway.stop()

    def _stop_process(self) -> bool:
        process, self._process = self._process, None
        if process is None or process.exit_status is not None:
            return True
        # After an error of ours, or without the process that would answer, there is none to wait for.
        at_once = self._stop.received is None or process.stub_died()
        if self.was_ready and not at_once:
            self._console.line(
                "\nstopping: finishing requests in flight (at most "
                f"{self._settings.drain_seconds:g} s)"
            )
        status = process.stop(self._wait_for_end, at_once)
        if at_once or status in (0, 128 + signal.SIGTERM):  # the latter while it was still loading
            return True
        for line in log_tail(process.read_log()):
            self._console.log(line)
        self._console.error(f"the server did not end in an orderly way ({_describe(status)})")
        return False

    def _start(self) -> None:
        self._error = None
        self._loading.clear()
        self._console.begin_phase("server")
        self._process = ServerProcess(self._server, self._settings)
        self._progress = LineTail(self._settings.progress_file)
        self._log = LineTail(self._settings.log_file, self._process.log_start)

    def _follow_until_ready(self) -> None:
        """Shows the model's phases until it takes requests. Raises if it never will."""
        while True:
            assert self._process is not None
            status = self._process.exit_status  # before reading, so that nothing is missed
            self._pass_on()
            if status is not None:
                raise self._load_error(self._process, status)
            if self._num_ready() == len(self._options.models):
                self._pass_on()
                self._console.end_phase()
                return
            self._console.tick()
            self._stop.sleep(0.1)

    def _num_ready(self) -> int:
        """How many of our models the server calls ready."""
        port = self._options.http_port
        return sum(model_is_ready(port, name) for name in self._options.models)

    def _follow_gateway(self, port: int) -> None:
        """Waits until the gateway answers. Raises if it ends instead."""
        self._console.begin_phase("gateway")
        while not gateway_is_up(port):
            assert self._gateway is not None
            if self._gateway.exit_status is not None:
                self._console.drop_phase()
                raise self._gateway_error()
            self._console.tick()
            self._stop.sleep(0.05)
        self._console.end_phase()

    def _gateway_error(self) -> CommandError:
        assert self._process is not None and self._gateway is not None
        for line in log_tail(self._process.read_log()):
            self._console.log(line)
        return CommandError(f"the gateway ended by itself (status {self._gateway.exit_status})")

    def _watch_gateway(self) -> None:
        """Starts the gateway again if it has died, unless that happened too often of late."""
        if self._gateway is None or self._gateway.exit_status is None:
            return
        error = self._gateway_error()
        if not self._gateway_budget.take(time.monotonic()):
            raise error
        self._console.error(f"{error}; it is started again")
        self._gateway = GatewayProcess(self._options, self._settings.log_file)

    def _load_error(self, process: ServerProcess, status: int) -> CommandError:
        self._console.drop_phase()
        lines = process.read_log()
        reason = self._error or reason_in_log(lines)
        if reason is None or self._error is None:
            for line in log_tail(lines):
                self._console.log(line)
        if reason is None:
            reason = f"the server ended with status {status} before it was ready"
        return CommandError(reason)

    def _check_answer(self) -> None:
        """Streams a first answer to the terminal."""
        console = self._console
        console.line(f"\n> {_QUESTION}")
        try:
            with self._stop.interruptible():
                answer = stream_answer(
                    self._options.http_port,
                    self._options.model_name,
                    _QUESTION,
                    _ANSWER_TOKENS,
                    console.stream,
                )
        except AnswerError as error:
            console.line()
            raise CommandError(
                f"the server is ready, but the self-check got no answer: {error}"
            ) from None
        console.line()
        console.line(
            f"first token after {answer.first_token_seconds:.2f} s, "
            f"{answer.num_responses} responses in {answer.total_seconds:.2f} s"
        )

    def _watch(self) -> None:
        """Returns never; raises :class:`_ServerFailed` once the server or its model has died."""
        process = self._process
        assert process is not None
        next_health = 0.0
        suspicious = False
        while True:
            status = process.exit_status
            self._pass_on()
            self._watch_gateway()
            if status is not None:
                raise _ServerFailed(f"the server ended by itself ({_describe(status)})")
            if self._error is not None:
                error, self._error = self._error, None
                # A model that a client loads may fail to; that is no fault of those that run.
                if not self._error_in_load:
                    raise _ServerFailed(error)
                self._console.drop_phase()
                self._console.error(error)
            if time.monotonic() >= next_health:
                next_health = time.monotonic() + _HEALTH_SECONDS
                # Some servers go on announcing a model whose process is gone. An unloaded model's
                # process is gone as well, but then the server does not call it ready.
                num_models = len(self._options.models)
                died = process.stub_died(num_models) and process.stub_died(self._num_ready())
                if died and suspicious:
                    raise _ServerFailed("the process that runs the model has died")
                suspicious = died
            self._stop.sleep(0.1)

    def _restart(self, error: _ServerFailed, budget: RestartBudget) -> None:
        """Brings the server back after ``error``, unless that happened too often of late."""
        while True:
            self._end_failed_server(str(error))
            now = time.monotonic()
            if not budget.take(now):
                raise CommandError(
                    f"{error}; not restarted again after {_MAX_RESTARTS} restarts in "
                    f"{_RESTART_WINDOW_SECONDS / 60:.0f} minutes"
                )
            self._console.line("restarting the server")
            self._stop.sleep(1.0)
            self._start()
            try:
                self._follow_until_ready()
            except CommandError as failed:
                error = _ServerFailed(str(failed))
                continue
            self._console.line(f"ready again after {time.monotonic() - now:.1f} s")
            return

    def _end_failed_server(self, reason: str) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._console.error(reason)
        for line in log_tail(process.read_log()):
            self._console.log(f"  {line}")
        process.stop(self._wait_for_end, at_once=True)

    def _wait_for_end(self) -> None:
        self._pass_on_log()
        time.sleep(0.05)

    def _pass_on(self) -> None:
        """Shows what the model and the server have told since the last call."""
        for line in self._progress.read_new():
            self._show_event(line)
        self._pass_on_log()

    def _pass_on_log(self) -> None:
        if self._options.verbose:
            for line in self._log.read_new():
                self._console.log(line)

    def _show_event(self, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return  # cut off where the disk was full
        model = event.get("model", "")
        # Several models load at once: each line tells of which it is.
        name = f"{model} " if len(self._options.models) > 1 and model else ""
        match event["event"]:
            case "begin":
                show = self._console.show_phase if self._loading else self._console.begin_phase
                self._loading[model] = name + event["phase"]
                show(name + event["phase"])
            case "progress" if list(self._loading)[-1:] == [model]:
                self._console.count(event["done"], event["total"])
            case "end":
                self._console.report_phase(self._loading.pop(model, ""), event["seconds"])
                for phase in list(self._loading.values())[-1:]:
                    self._console.show_phase(phase)
            case "settings":
                self._console.line(f"  {name}{event['text']}")
            case "warning":
                self._console.warn(name + event["text"])
            case "error":
                self._error = f"{model}: {event['text']}" if name else event["text"]
                self._error_in_load = self._loading.pop(model, None) is not None


def _describe(status: int) -> str:
    return f"signal {status - 128}" if status > 128 else f"status {status}"
