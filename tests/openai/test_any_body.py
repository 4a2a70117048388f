"""Whatever the fields of a body hold, the answer is a result or the caller's mistake by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.client.fake_server import FakeServer
from tests.openai.running import RunningGateway
from trident_client.openai.chat_request import ChatRequest
from trident_client.openai.completions import CompletionRequest
from trident_client.openai.responses_request import ResponsesRequest

GOOD: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(("auto", "required", "function", "json_schema", "user"))
)  # fmt: skip
KEYS = st.sampled_from(("type", "role", "content", "name", "function", "parameters", "format", "x"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


@pytest.mark.parametrize("path", GOOD)
def test_any_body(server: FakeServer, gateway: RunningGateway, path: str) -> None:
    model, good = GOOD[path]
    names = st.sampled_from(sorted(set(model.model_fields) - {"model"}))
    with httpx.Client(base_url=gateway.url, timeout=60) as client:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(names, VALUES, max_size=4))
        def check(fields: dict[str, Any]) -> None:
            body = json.dumps({**good, **fields}).encode()
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]

        check()
