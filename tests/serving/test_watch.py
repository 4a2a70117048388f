from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from trident_llm.serving import watch
from trident_llm.serving.watch import Endpoint, ServerWatch, find_endpoint


@pytest.mark.parametrize(
    ("command", "endpoint"),
    [
        (["/opt/tritonserver", "--http-port=8123"], Endpoint("127.0.0.1", 8123)),
        (["tritonserver", "--http-port", "8123"], Endpoint("127.0.0.1", 8123)),
        (["tritonserver"], Endpoint("127.0.0.1", 8000)),
        (["tritonserver", "--http-address=10.1.1.1"], Endpoint("10.1.1.1", 8000)),
        (["tritonserver", "--allow-http=false"], None),
        (["tritonserver", "--http-port=x"], None),
        (["python3", "server.py"], None),
        ([], None),
    ],
)
def test_the_endpoint_is_read_off_the_servers_command_line(
    command: list[str], endpoint: Endpoint | None
) -> None:
    assert find_endpoint(command) == endpoint


class FakeServer:
    """Answers the readiness question with what ``statuses`` hold, the last one for ever."""

    def __init__(self, statuses: list[int]) -> None:
        answered = self.answered = threading.Semaphore(0)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/v2/models/llm/versions/1/ready"
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.end_headers()
                answered.release()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = Endpoint("127.0.0.1", self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(watch, "FIRST_POLL_SECONDS", 0.001)
    return


def leaves_after(statuses: list[int]) -> bool:
    server = FakeServer(list(statuses))
    watcher = ServerWatch("llm", "1", server.endpoint)
    watcher.start()
    for _ in statuses:
        assert server.answered.acquire(timeout=60)
    # One more round, so that the last answer has been taken in; none comes once it saw a leave.
    server.answered.acquire(timeout=0.2)
    watcher.stop()
    server.close()
    return watcher.server_leaves()


@pytest.mark.parametrize(
    ("statuses", "leaves"),
    [
        ([200, 200, 400], True),
        ([400, 400, 200, 503], True),
        ([200, 200, 200], False),
        ([400, 400, 400], False),
        ([200, 403, 200], False),
    ],
)
def test_not_ready_means_leaving_only_after_ready(statuses: list[int], leaves: bool) -> None:
    assert leaves_after(statuses) is leaves


def test_a_closed_endpoint_means_leaving() -> None:
    server = FakeServer([200])
    watcher = ServerWatch("llm", "1", server.endpoint)
    watcher.start()
    assert server.answered.acquire(timeout=60)
    assert server.answered.acquire(timeout=60)
    server.close()
    watcher._thread.join(60)
    assert watcher.server_leaves()
