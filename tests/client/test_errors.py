"""What a text and a status become."""

from __future__ import annotations

import re

import grpc
import pytest

from trident_client import errors
from trident_client.errors import TridentError, from_status, from_text


@pytest.mark.parametrize(
    ("text", "kind", "code", "field"),
    [
        (
            "INVALID_ARG sampling_parameters.temperature: must be 0 or more",
            errors.InvalidArgument,
            "INVALID_ARG",
            "sampling_parameters.temperature",
        ),
        ("UNAVAILABLE queue: 9 wait", errors.Unavailable, "UNAVAILABLE", "queue"),
        ("CANCELLED request: by the client", errors.Cancelled, "CANCELLED", "request"),
        ("CANCELLED by the client", errors.Cancelled, "CANCELLED", None),
        ("INTERNAL engine: a fault", errors.ServerError, "INTERNAL", "engine"),
        (
            "[request id: 7] INVALID_ARG text_input: is empty",
            errors.InvalidArgument,
            "INVALID_ARG",
            "text_input",
        ),
        ("Error generating stream: oops", errors.ServerError, None, None),
        ("Exceeds maximum queue size", errors.Unavailable, None, None),
        ("[request id: 7] expected 1 inputs but got 0", errors.InvalidArgument, None, None),
        ("UNAVAILABLENESS is not a code", errors.ServerError, None, None),
        ("Request for unknown model: 'x' is not found", errors.NotFound, None, None),
    ],
)
def test_texts(text: str, kind: type[TridentError], code: str | None, field: str | None) -> None:
    error = from_text(text, request_id="r")
    assert type(error) is kind
    assert (error.code, error.field, error.request_id, str(error)) == (code, field, "r", text)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", errors.ConnectionFailed),
        ("UNAVAILABLE", "UNAVAILABLE queue: full", errors.Unavailable),
        ("UNAVAILABLE", "GRPC server is shutting down and has stopped", errors.Unavailable),
        ("UNAVAILABLE", "Request for unknown model: 'x' has no versions", errors.NotFound),
        ("INVALID_ARGUMENT", "expected 1 inputs but got 0", errors.InvalidArgument),
        ("INVALID_ARGUMENT", "INTERNAL engine: the text's code wins", errors.ServerError),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.DeadlineExceeded),
        ("UNAUTHENTICATED", "who are you", errors.AccessDenied),
        ("NOT_FOUND", None, errors.NotFound),
        ("UNKNOWN", None, errors.ServerError),
    ],
)
def test_statuses(status: str, text: str | None, kind: type[TridentError]) -> None:
    error = from_status(grpc.StatusCode[status], text)
    assert type(error) is kind
    assert str(error) == (text or f"the server answered {status} without a text")


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Each drawn line `+-- Name` is a class whose parent is the last one drawn further left."""
    drawn: dict[str, str] = {}
    above: dict[int, str] = {0: "TridentError"}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([| ]*)\+-- (\w+)", line):
            depth = len(match[1]) // 4 + 1
            above[depth] = match[2]
            drawn[match[2]] = above[depth - 1]
    real = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, TridentError) and kind is not TridentError
    }
    assert drawn == real
