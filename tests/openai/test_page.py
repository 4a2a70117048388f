"""The page's files: who may have them, what their headers say, and that it can be left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.client.fake_server import FakeServer
from tests.openai.running import RunningGateway
from trident_client.openai.web_page import FOLDER

KEY = {"Authorization": "Bearer right"}


@pytest.fixture
def guarded(server: FakeServer, tmp_path: Path) -> Iterator[RunningGateway]:
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with RunningGateway(server.url, api_key_file=str(keys)) as gateway:
        yield gateway


def test_every_file_is_served_with_its_type_and_guards(gateway: RunningGateway) -> None:
    names = sorted(path.name for path in FOLDER.iterdir())
    assert {"index.html", "main.js", "base.css", "icon.svg"} <= set(names)
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for name in names:
            path = "/" if name == "index.html" else f"/page/{name}"
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert answer.content == (FOLDER / name).read_bytes()
            expected = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
            assert answer.headers["content-type"].startswith(
                expected.get(name.rpartition(".")[2], "image/svg+xml")
            )
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"


def test_nothing_else_is_served(gateway: RunningGateway) -> None:
    for path in ("/page/", "/page/../access.py", "/page/%2e%2e/access.py", "/page/none.js"):
        assert gateway.get(path).status_code == 404, path
    assert gateway.post("/", {}).status_code == 405


def test_the_page_names_no_other_place_and_holds_no_inline_code() -> None:
    """What the policy would forbid, and what would not work without a network."""
    for path in FOLDER.iterdir():
        text = path.read_text()
        places = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", text))
        assert places <= {"http://www.w3.org/2000/svg"}, path
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, path
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\s(?:on\w+|style)=", page)
    for name in re.findall(r'(?:src|href)="page/([^"]+)"', page):
        assert (FOLDER / name).is_file(), name


def test_with_keys_the_files_need_none_and_the_stats_do(guarded: RunningGateway) -> None:
    assert guarded.get("/").status_code == 200
    assert guarded.get("/page/main.js").status_code == 200
    assert guarded.get("/page/config.json").json() == {"needs_key": True}
    assert guarded.get("/stats").status_code == 401
    assert guarded.get("/stats", headers=KEY).json() == {"num_free_blocks": 7}
    assert guarded.get("/metrics").status_code == 401


def test_stats_are_those_of_a_model(server: FakeServer, gateway: RunningGateway) -> None:
    assert gateway.get("/page/config.json").json() == {"needs_key": False}
    assert gateway.get("/stats?model=llm").json() == {"num_free_blocks": 7}
    assert server.requests[-1].inputs["control"] == '{"op": "stats", "detail": true}'
    assert gateway.get("/stats?model=other").status_code == 404


def test_a_server_without_stats_is_said_to_be_one(
    server: FakeServer, gateway: RunningGateway
) -> None:
    del server.inputs["control"]
    with RunningGateway(server.url) as other:
        answer = other.get("/stats")
    assert answer.status_code == 400
    assert "stats" in answer.json()["error"]["message"]


def test_the_page_can_be_turned_off(server: FakeServer) -> None:
    with RunningGateway(server.url, page=False) as gateway:
        for path in ("/", "/page/main.js", "/page/config.json", "/stats"):
            assert gateway.get(path).status_code == 404, path
        assert gateway.get("/v1/models").status_code == 200
