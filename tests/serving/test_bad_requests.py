"""What is malformed is refused by name, and no refusal repeats what was sent."""

from __future__ import annotations

import pytest

from tests.serving import fuzz
from tests.serving.bad_requests import MARK, BadRequest, bad_requests
from trident_llm.core.errors import RequestError
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.serving.protocol import RawRequest, parse_request

# These only the tokenizer, the template or the model can refuse.
_LATER = (
    "max_tokens", "input_ids", "messages", "control", "no text", "too long", "chat tools", "stop_",
    "allowed_", "logit_", "chat chat_template_kwargs",
)  # fmt: skip
AT_THE_DOOR = [bad for bad in bad_requests() if not bad.by_triton]


def refusal(bad: BadRequest) -> RequestError | None:
    try:
        parse_request(RawRequest(bad.tensors, ""), SamplingParams())
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("bad", AT_THE_DOOR, ids=lambda bad: bad.name[:40])
def test_by_name(bad: BadRequest) -> None:
    error = refusal(bad)
    if error is None:
        assert any(name in bad.name for name in _LATER), "was read"
        return
    assert str(error).startswith(f"INVALID_ARG {bad.field}")
    assert MARK not in str(error)


def test_random_requests_are_read_or_refused() -> None:
    fuzz.run(600)
