"""Scripts for the model server of these tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.client.fake_server import Request, Script, message


def saying(*pieces: str, reason: str = "stop", n: int = 1) -> Script:
    """Answers each sequence with these pieces, one token each; whole where it is not a stream."""

    def script(request: Request) -> Iterator[Any]:
        texts = pieces if request.inputs["stream"] else ("".join(pieces),)
        for number, text in enumerate(texts):
            last = number == len(texts) - 1
            yield message(
                text_output=[text] * n,
                finish_reason=[reason if last else "None"] * n,
                stop_reason=["None"] * n,
                num_input_tokens=[5],
                num_output_tokens=[len(pieces) if len(texts) == 1 else 1] * n,
                num_cached_tokens=[4],
                final=last,
                **_logprobs(request, pieces if len(texts) == 1 else [text], n),
            )

    return script


def _logprobs(request: Request, tokens: Sequence[str], n: int) -> dict[str, list[Any]]:
    if not request.inputs.get("return_logprobs"):
        return {}
    listed = [
        {
            str(index): {"logprob": -0.5, "rank": 2, "decoded_token": token},
            "99": {"logprob": -0.25, "rank": 1, "decoded_token": "é"},
            "98": {"logprob": -0.75, "rank": 3, "decoded_token": "\ufffd", "bytes": [0xC3]},
        }
        for index, token in enumerate(tokens)
    ]
    return {"logprobs": [json.dumps(listed)] * n}


def failing(text: str, after: int = 0) -> Script:
    """Gives `after` tokens and then the error."""

    def script(request: Request) -> Iterator[Any]:
        for number in range(after):
            yield message(
                text_output=[f"t{number} "], finish_reason=["None"], num_output_tokens=[1]
            )
        yield message(error=text, final=True)

    return script
