"""llama.cpp through llama-cpp-python, which runs one sequence at a time: for W1 and W4.

The library is built natively for this machine (GGML_NATIVE); the model is a GGUF file:

    env LLAMA_CPP_LIB_PATH=FOLDER PYTHON -m perf.peers.llama_cpp_peer --model FILE --worker
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from typing import Any

from perf import peers
from perf.workloads import RequestSpec


class LlamaCppPeer:
    """One sequence after another, greedy."""

    def __init__(self, given: argparse.Namespace) -> None:
        from llama_cpp import Llama  # type: ignore[import-not-found]

        self._llama: Any = Llama(
            given.model, n_ctx=peers.MAX_LEN, n_threads=peers.THREADS, flash_attn=True,
            n_threads_batch=peers.THREADS, n_batch=2048, n_ubatch=512, verbose=False,
        )  # fmt: skip
        self._waiting: deque[tuple[int, RequestSpec]] = deque()
        self._tokens: Iterator[tuple[int, int]] = iter(())

    def add(self, key: int, spec: RequestSpec) -> None:
        self._waiting.append((key, spec))

    def step(self) -> list[tuple[int, int]]:
        token = next(self._tokens, None)
        if token is None:
            self._tokens = self._generate(*self._waiting.popleft())
            token = next(self._tokens)
        return [token]

    def _generate(self, key: int, spec: RequestSpec) -> Iterator[tuple[int, int]]:
        tokens = self._llama.generate(list(spec.prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
        for _, _ in zip(range(spec.output_len), tokens):
            yield key, 1


if __name__ == "__main__":
    peers.main(__doc__, LlamaCppPeer, "model")
