"""What waits for a slow reader: joined in order, charged for, and never more than may wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trident_client import Choice, Delta, Logprob, Result, Usage
from trident_client.openai.pump import Pump, SlowReader


class Stream:
    """Gives its deltas as fast as they are taken."""

    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = deltas
        self._given = 0
        self.cancelled = False

    @property
    def usage(self) -> Usage:
        return Usage(5, self._given, 0)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> Any:
        for delta in self._deltas:
            self._given += 1
            yield delta

    async def result(self) -> Result:
        return Result((Choice("".join(delta.text for delta in self._deltas)),), self.usage)


def delta(number: int, index: int = 0, end: str | None = None) -> Delta:
    candidate = Logprob(number, -1.0, 1, f"{number} ")
    return Delta(f"{number} ", index, end, None, (number,), 1, ((candidate,),))


def test_what_was_not_read_comes_joined_and_in_order() -> None:
    numbers = range(300)  # more than are kept by themselves
    deltas = [delta(n, index) for n in numbers for index in (0, 1)]
    deltas += [delta(300, 0, "stop"), delta(300, 1, "length")]
    charged: list[int] = []

    async def main() -> list[tuple[int, Delta]] | None:
        stream: Any = Stream(deltas)
        async with Pump([stream], max_unread_bytes=2**20, charge=charged.append) as pump:
            while pump.results[0] is None:
                await asyncio.sleep(0)
            news = await pump.next(10)
            assert await pump.next(10) is None
            return news

    news = asyncio.run(main())
    assert news is not None
    assert [(prompt, each.index, each.finish_reason) for prompt, each in news] == [
        (0, 0, "stop"), (0, 1, "length"),
    ]  # fmt: skip
    for _, each in news:
        assert each.text == "".join(f"{n} " for n in range(301))
        assert each.token_ids == tuple(range(301))
        assert each.num_tokens == 301
        assert each.logprobs is not None
        assert [token[0].token_id for token in each.logprobs] == list(range(301))
    assert charged == [5 + 602]


def test_a_limit_ends_the_request_and_what_it_took_is_charged() -> None:
    charged: list[int] = []

    async def main() -> Stream:
        made = Stream([Delta("x" * 100, num_tokens=1)] * 1000)
        stream: Any = made
        async with Pump([stream], max_unread_bytes=950, charge=charged.append) as pump:
            await asyncio.wait_for(pump.overflowed.wait(), 30)
            with pytest.raises(SlowReader):
                await pump.next(10)
        return made

    assert asyncio.run(main()).cancelled
    assert charged == [5 + 10]
