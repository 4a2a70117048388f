"""Requests of every kind that a soak sends, and what each must come to.

A request is a function of its kind and number, so its answer can be taken once, alone, and held against
every later one. Knows nothing of servers but the client. Invariant: with weights in float32 an answer
does not depend on what else runs, on preemption or on the prefix cache, as far as no draw lies within a
rounding error of the bound between two tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trident_client import AsyncClient, DeadlineExceeded, InvalidArgument, Result, Unavailable

NUM_EACH = 6  # different requests of each kind

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
_BAD: Sequence[dict[str, Any]] = (
    {"temperature": -1}, {"max_tokens": 10**6}, {"top_p": 0}, {"nonsense": 1}, {"n": 1000},
    {"structured_outputs": {"regex": "("}},
)  # fmt: skip

# How often each kind is sent.
WEIGHTS = {
    "short": 8, "long": 2, "shared prefix": 4, "several": 2, "beams": 1, "structured": 2,
    "scored": 1, "cancelled": 3, "timed out": 2, "bad": 3,
}  # fmt: skip

Answer = tuple[tuple[int, str, tuple[int, ...], str | None], ...]
"""Per sequence its index, text, token ids and why it ended."""


class Mismatch(Exception):
    """An answer is another one than that of the request alone."""


@dataclass(frozen=True)
class MixedRequest:
    """One request."""

    kind: str
    number: int
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def has_answer(self) -> bool:
        """Whether an answer is looked at."""
        return self.kind not in ("bad", "timed out")

    async def alone(self, client: AsyncClient) -> Answer:
        """Its answer; of one that will be left in the middle the beginning."""
        sampling = dict(self.sampling)
        if self.kind == "cancelled":
            sampling["max_tokens"] = min(64, sampling["max_tokens"])
        return _answer(await client.generate(self.prompt, **sampling))

    async def send(self, client: AsyncClient, expected: Answer | None, rng: random.Random) -> str:
        """Sends it, in one of the ways that its kind is sent; what became of it, in a word.

        Raises:
            Mismatch: the answer, or the part of it that was read, is not ``expected``.
            TridentError: it failed, or was refused otherwise than it must be.
        """
        if self.kind == "bad":
            try:
                await client.generate(self.prompt, **self.sampling)
            except InvalidArgument:
                return "refused as it must be"
            raise Mismatch(f"{self.name} was answered")
        if self.kind == "timed out":
            try:
                patience = rng.uniform(0.001, 0.01)
                await client.generate(self.prompt, timeout=patience, **self.sampling)
            except DeadlineExceeded:
                return "timed out"
            except Unavailable as error:
                if error.field == "timeout":
                    return "timed out"
                raise
            return "answered"
        assert expected is not None
        if self.kind == "cancelled":
            return await self._leave(client, expected, rng.choice([0, 1, 2, 5, 20]))
        if rng.random() < 0.5:
            result = await client.generate(self.prompt, **self.sampling)
        else:
            result = await client.stream(self.prompt, **self.sampling).result()
        if (answer := _answer(result)) != expected:
            raise Mismatch(f"{self.name}: {answer!r} instead of {expected!r}")
        return "answered"

    async def _leave(self, client: AsyncClient, expected: Answer, after: int) -> str:
        """Reads ``after`` deltas and goes."""
        ids: list[int] = []
        async with client.stream(self.prompt, **self.sampling) as stream:
            if after:
                async for number, delta in _numbered(stream):
                    ids += delta.token_ids or ()
                    if number == after:
                        break
        whole = list(expected[0][2])
        common = min(len(ids), len(whole))
        if ids[:common] != whole[:common]:
            raise Mismatch(f"{self.name}: {ids} instead of {whole}")
        return "left"


async def _numbered(stream: Any) -> Any:
    number = 0
    async for item in stream:
        number += 1
        yield number, item


def _answer(result: Result) -> Answer:
    return tuple(
        (choice.index, choice.text, choice.token_ids or (), choice.finish_reason)
        for choice in result.choices
    )


def make_requests(vocab_size: int, max_model_len: int) -> list[MixedRequest]:
    """All requests of the mix, for a model with so many tokens and so long a context."""
    rng = random.Random("mix")
    most = min(max_model_len, 1024)

    def prompt(shortest: int, longest: int) -> tuple[int, ...]:
        length = rng.randint(shortest, longest)
        return tuple(rng.randrange(3, vocab_size) for _ in range(length))

    prefix = prompt(most // 4, most // 4)
    made = []
    for number in range(NUM_EACH):
        # After random tokens all of a large vocabulary is about equally likely: draws from all of it come
        # so near to the bounds between tokens that rounding, which depends on the batch, moves some over.
        sampled = {"temperature": 0.8, "top_k": 20, "seed": number, "ignore_eos": True}
        greedy = {"temperature": 0, "ignore_eos": True}
        beams = {"use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": 12}
        structured = {
            "structured_outputs": {"json": _SCHEMA}, "temperature": 1.2, "seed": number,
            "max_tokens": 60,
        }  # fmt: skip
        kinds: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "short": (prompt(1, 30), {**sampled, "max_tokens": rng.randint(1, 32)}),
            "long": (prompt(most // 2, most * 3 // 4), {**greedy, "max_tokens": most // 8}),
            "shared prefix": (prefix + prompt(1, 20), {**greedy, "max_tokens": 24}),
            "several": (prompt(5, 40), {**sampled, "n": 3, "max_tokens": 20}),
            "beams": (prompt(5, 40), beams),
            "structured": (prompt(5, 20), structured),
            "scored": (prompt(20, 60), {"max_tokens": 0, "prompt_logprobs": 1}),
            "cancelled": (prompt(1, most // 2), {**sampled, "max_tokens": most // 3}),
            "timed out": (prompt(1, most // 2), {**sampled, "max_tokens": most // 3}),
            "bad": (prompt(1, 30), _BAD[number % len(_BAD)]),
        }
        made += [MixedRequest(kind, number, *content) for kind, content in kinds.items()]
    return made
