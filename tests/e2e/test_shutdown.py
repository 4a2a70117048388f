"""Leaving under load: what can finish finishes, the rest ends with an error, nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.command import wait_for
from tests.e2e.server import RunningServer
from trident_client import StreamInterrupted, Unavailable

pytestmark = pytest.mark.e2e


def test_a_signal_under_load_and_another_one(tmp_path: Path, default_model: Path) -> None:
    with RunningServer(
        tmp_path, "--no-self-check", "--drain-seconds=5", "--num-blocks=600"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        short = [client.stream("One", max_tokens=4, ignore_eos=True) for _ in range(3)]
        long = [client.stream("Two", max_tokens=2000, ignore_eos=True) for _ in range(3)]
        for stream in short + long:
            next(stream)
        server.send_signal(signal.SIGTERM)
        for stream in short:
            assert stream.result().finish_reason == "length"
        server.send_signal(signal.SIGTERM)
        for stream in long:
            with pytest.raises((Unavailable, StreamInterrupted)) as caught:
                stream.result()
            assert isinstance(caught.value, Unavailable), caught.value
        wait_for(lambda: server.exit_status is not None, "the server stops", seconds=40)
    assert server.exit_status == 0
