"""The workloads that every benchmark runs: prompts of token ids, exact output lengths, arrivals.

Knows nothing of engines or servers. Invariant: a workload is a function of its name, the repetition
and the vocabulary. Repetitions have equal lengths and arrivals but other token ids, so that a warm
prefix cache answers none of them.

W1        one stream, 128 tokens in, 128 out
W2        64 requests at once, uniform 16 to 256 in and out
W3        32 requests at once that share a prefix of 512 tokens, with 16 of their own, 32 out
W4        one prompt of 4,096 tokens, 16 out
W5        30 requests with the lengths of W2 that arrive at random (Poisson), 2 a second
sharegpt  64 requests at once with lengths like chats of ShareGPT: means 161 in, 338 out
alpaca    64 requests at once with lengths like instructions of Alpaca: means 19 in, 58 out
chunks    8 streams of 16 in, 256 out; from the first second on every second a prompt of 2,048, 4 out

The two means are those of the paper on PagedAttention (arXiv 2309.06180, section 6.1); the form, a
log-normal distribution, and its spread are ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = ("W1", "W2", "W3", "W4", "W5", "sharegpt", "alpaca", "chunks")

# Below lie the special tokens of common tokenizers.
_FIRST_ID = 100
# Ids that vocabularies of 49,000 tokens and more have, so that they all get the same prompts.
_END_ID = 49_000


@dataclass(frozen=True)
class RequestSpec:
    """One request: greedy, and it ends after exactly ``output_len`` tokens."""

    prompt: tuple[int, ...]  # token ids
    output_len: int
    arrival: float = 0.0  # seconds after the start


@dataclass(frozen=True)
class LogNormal:
    """Lengths in tokens whose logarithm is normal, rounded, cut to ``shortest`` .. ``longest``."""

    mean: float  # before the cut
    sigma: float  # standard deviation of the logarithm
    shortest: int = 1
    longest: int = 2048

    def draw(self, rng: random.Random) -> int:
        # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(max(round(rng.lognormvariate(mu, self.sigma)), self.shortest), self.longest)


SHAREGPT = (LogNormal(161, 1.0, shortest=4), LogNormal(338, 0.9, shortest=4))
ALPACA = (LogNormal(19, 0.6, shortest=4), LogNormal(58, 0.8, shortest=4))


def make(name: str, repetition: int = 0, *, vocab_size: int = _END_ID) -> list[RequestSpec]:
    """The requests of a workload by name, in order of arrival.

    ``vocab_size`` bounds the token ids. Raises KeyError for a name that is not in :data:`NAMES`.
    """
    draw = _PromptMaker(random.Random(f"{name}, repetition {repetition}"), vocab_size)
    makers: dict[str, Callable[[], list[RequestSpec]]] = {
        "W1": lambda: [RequestSpec(draw(128), 128)],
        "W2": lambda: requests(uniform_lengths(64), draw),
        "W3": lambda: _shared_prefix(draw, count=32, prefix=512, own=16, output=32),
        "W4": lambda: [RequestSpec(draw(4096), 16)],
        "W5": lambda: requests(uniform_lengths(30), draw, poisson_arrivals(30, rate=2.0)),
        "sharegpt": lambda: requests(log_normal_lengths(SHAREGPT, 64), draw),
        "alpaca": lambda: requests(log_normal_lengths(ALPACA, 64), draw),
        "chunks": lambda: requests(
            [(16, 256)] * 8 + [(2048, 4)] * 4, draw, [0.0] * 8 + [1.0, 2.0, 3.0, 4.0]
        ),
    }
    return makers[name]()


def warm_up(*, vocab_size: int = _END_ID) -> list[RequestSpec]:
    """Requests of all shapes, run before anything is timed."""
    draw = _PromptMaker(random.Random("warm up"), vocab_size)
    return [RequestSpec(draw(length), 8) for length in (16, 128, 300, 1024)]


def longest(names: Sequence[str]) -> int:
    """Tokens, prompt and output, of the longest request in any of the workloads."""
    return max(len(spec.prompt) + spec.output_len for name in names for spec in make(name))


def uniform_lengths(count: int) -> list[tuple[int, int]]:
    """Lengths (in, out), uniform 16 to 256; the first of a longer list are those of a shorter one."""
    rng = random.Random(0)
    return [(rng.randint(16, 256), rng.randint(16, 256)) for _ in range(count)]


def log_normal_lengths(
    distributions: tuple[LogNormal, LogNormal], count: int
) -> list[tuple[int, int]]:
    """Lengths (in, out) by the two distributions; always the same."""
    rng = random.Random(0)
    prompt, output = distributions
    return [(prompt.draw(rng), output.draw(rng)) for _ in range(count)]


def poisson_arrivals(count: int, *, rate: float) -> list[float]:
    """Arrival times in seconds of a Poisson process with ``rate`` arrivals a second."""
    rng = random.Random(0)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals


def requests(
    lengths: Sequence[tuple[int, int]],
    draw: Callable[[int], tuple[int, ...]],
    arrivals: Sequence[float] | None = None,
) -> list[RequestSpec]:
    """Requests with the given lengths (in, out), all at once or at the given times."""
    times = arrivals if arrivals is not None else [0.0] * len(lengths)
    return [RequestSpec(draw(size), output, at) for (size, output), at in zip(lengths, times)]


def _shared_prefix(
    draw: _PromptMaker, *, count: int, prefix: int, own: int, output: int
) -> list[RequestSpec]:
    shared = draw(prefix)
    return [RequestSpec(shared + draw(own), output) for _ in range(count)]


@dataclass(frozen=True)
class _PromptMaker:
    """Random prompts of a given length."""

    rng: random.Random
    vocab_size: int

    def __call__(self, length: int) -> tuple[int, ...]:
        end = min(self.vocab_size, _END_ID)
        first = min(_FIRST_ID, end // 2)  # for vocabularies of tests
        return tuple(self.rng.randrange(first, end) for _ in range(length))
