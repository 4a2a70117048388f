"""What a call gives back: pieces while it runs, a result at its end, and what a model offers.

Owns the result types and the folding of pieces into a result; knows nothing about transport.
Invariant: joining the texts of a sequence's deltas gives exactly the text of its `Choice`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trident_client.errors import ServerError
from trident_client.wire import Array, Response

__all__ = [
    "Choice",
    "Collector",
    "Delta",
    "Embeddings",
    "Logprob",
    "ModelInfo",
    "Result",
    "Times",
    "Usage",
]


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position. `rank` is 1 for the most likely token of the vocabulary.

    `token_bytes` is there where the token is only part of a character, so that `decoded_token` cannot
    tell it, and the server does.
    """

    token_id: int
    logprob: float
    rank: int | None
    decoded_token: str | None
    token_bytes: bytes | None = None


Logprobs = tuple[tuple[Logprob, ...], ...]
"""One entry per token; its candidates in the server's order."""


PromptLogprobs = tuple[tuple[Logprob, ...] | None, ...]
"""One entry per token of the prompt: the token's own first, then the most likely ones. The first
token, which nothing precedes, has None."""


@dataclass(frozen=True)
class Times:
    """Moments in a request's life on the server, nanoseconds since 1970; None for what never came."""

    arrival_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; None where the model does not tell. `cached_tokens` of the prompt were
    found in the prefix cache; `completion_tokens` counts all of the request's sequences."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Delta:
    """What one response adds to one sequence (`index`, 0 up to n).

    `text` may be empty while part of a character, or of a possible stop string, is held back.
    `token_ids` and `num_tokens` are this response's new tokens, `cumulative_logprob` the sequence's
    sum so far; each is None where it was not asked for or the model has no such output.
    """

    text: str
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    num_tokens: int | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Choice:
    """One whole sequence; the fields are those of its deltas, joined."""

    text: str
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Result:
    """A request's whole output. With ``n=1`` read it directly, with more through `choices`.

    `prompt_logprobs` is there if the sampling parameter of that name was given, `times` with
    ``return_perf_metrics=True``.

    >>> result = Result((Choice("Paris", finish_reason="stop"),), Usage(5, 1))
    >>> result.text, result.finish_reason, result.usage.prompt_tokens
    ('Paris', 'stop', 5)
    """

    choices: tuple[Choice, ...]
    usage: Usage
    request_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    times: Times | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | None:
        return self.choices[0].stop_reason

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> Logprobs | None:
        return self.choices[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.choices[0].cumulative_logprob


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The vectors of some texts, float32 [number of texts, dimensions], in the order of the texts.

    >>> import numpy as np
    >>> result = Embeddings(np.array([[0.5, 1.0]], np.float32), Usage(prompt_tokens=3))
    >>> result.vector.tolist(), result.usage.prompt_tokens
    ([0.5, 1.0], 3)
    """

    vectors: Array
    usage: Usage

    @property
    def vector(self) -> Array:
        """The vector of the first text, float32 [dimensions]."""
        vector: Array = self.vectors[0]
        return vector


@dataclass(frozen=True)
class ModelInfo:
    """A served model: name to datatype of its inputs and outputs, as the server reports them."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def _parse_logprobs(text: str) -> Logprobs | None:
    try:
        positions = json.loads(text)
        if positions is None:
            return None
        return tuple(_candidates(position) for position in positions)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ServerError(f"the server sent output logprobs unreadably: {error}") from None


def _parse_prompt_logprobs(text: str) -> PromptLogprobs | None:
    try:
        positions = json.loads(text)
        if positions is None:
            return None
        return tuple(None if each is None else _candidates(each) for each in positions)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ServerError(f"the server sent output prompt_logprobs unreadably: {error}") from None


def _candidates(position: Mapping[str, Any]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(
            int(token),
            entry["logprob"],
            entry.get("rank"),
            entry.get("decoded_token"),
            bytes(entry["bytes"]) if "bytes" in entry else None,
        )
        for token, entry in position.items()
    )


@dataclass
class _Sequence:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    logprobs: list[tuple[Logprob, ...]] | None = None
    last: Delta = Delta("")

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.last = delta

    def choice(self, index: int) -> Choice:
        return Choice(
            text="".join(self.texts),
            index=index,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            token_ids=None if self.token_ids is None else tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            cumulative_logprob=self.last.cumulative_logprob,
        )


class Collector:
    """Turns the responses of one request into deltas and, at the end, into its result."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._times: Times | None = None

    def feed(self, response: Response) -> list[Delta]:
        """The deltas of one response: for n=1 one, else one for each sequence that has news."""
        texts = response.texts("text_output")
        self._count(response)
        deltas = []
        for index, text in enumerate(texts):
            delta = self._delta(response, index, text, alone=len(texts) == 1)
            sequence = self._sequences.setdefault(index, _Sequence())
            silent = not text and not delta.num_tokens
            if len(texts) > 1 and silent and delta.finish_reason == sequence.last.finish_reason:
                continue
            sequence.add(delta)
            deltas.append(delta)
        return deltas

    def result(self, request_id: str) -> Result:
        """All that was fed."""
        choices = [sequence.choice(index) for index, sequence in sorted(self._sequences.items())]
        return Result(
            tuple(choices) or (Choice(""),),
            self.usage,
            request_id,
            self._prompt_logprobs,
            self._times,
        )

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def _count(self, response: Response) -> None:
        for number in response.numbers("num_input_tokens"):
            self._prompt_tokens = number
        for number in response.numbers("num_cached_tokens"):
            self._cached_tokens = number
        if "num_output_tokens" in response.outputs:
            new = sum(response.numbers("num_output_tokens"))
            self._completion_tokens = (self._completion_tokens or 0) + new
        for text in response.texts("prompt_logprobs"):
            self._prompt_logprobs = _parse_prompt_logprobs(text)
        if "arrival_time_ns" in response.outputs:
            moments = (
                _at(response.numbers(f"{name}_time_ns"), 0) or None
                for name in ("arrival", "first_scheduled", "first_token", "last_token")
            )
            self._times = Times(*moments)

    def _delta(self, response: Response, index: int, text: str, *, alone: bool) -> Delta:
        reason = _at(response.texts("finish_reason"), index)
        stop = _at(response.texts("stop_reason"), index)
        logprobs = _at(response.texts("logprobs"), index)
        has_ids = alone and "token_ids" in response.outputs
        return Delta(
            text=text,
            index=index,
            finish_reason=None if reason in (None, "", "None") else reason,
            stop_reason=None if stop in (None, "", "None") else stop,
            token_ids=tuple(response.numbers("token_ids")) if has_ids else None,
            num_tokens=_at(response.numbers("num_output_tokens"), index),
            logprobs=None if logprobs is None else _parse_logprobs(logprobs),
            cumulative_logprob=_at(response.numbers("cumulative_logprob"), index),
        )


_Item = TypeVar("_Item")


def _at(items: list[_Item], index: int) -> _Item | None:
    return items[index] if index < len(items) else None
