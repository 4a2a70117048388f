"""Decode steps recorded once per batch size and replayed: a GPU then waits for no Python.

A recorded step is the decoder's forward pass up to the hidden states, over tensors that stay where
they are; a step of fewer rows is padded to the next size, with rows that write to block 0 alone. What
the step's tensors hold is copied in before each replay. Nothing here knows of requests or rows.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trident_llm.model.batch import Batch

Run = Callable[[], torch.Tensor]
# Runs a function once to warm it up, records it, and gives its replay, which returns the same tensor.
Recorder = Callable[[Run], Run]

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record: dense enough that little is padded."""
    return [size for size in SIZES if size < max_num_seqs] + [min(max_num_seqs, SIZES[-1])]


class CudaRecorder:
    """Records CUDA graphs, whose temporaries share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # kernels are compiled and cuBLAS makes its workspace, which no capture may
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class _Recorded:
    inputs: Batch
    replay: Run


class DecodeGraphs:
    """Recorded steps by batch size. A step's result is valid until the next one."""

    def __init__(self, forward: Callable[[Batch], torch.Tensor], record: Recorder) -> None:
        self._forward = forward
        self._record = record
        self._recorded: dict[int, _Recorded] = {}
        self._sizes: list[int] = []

    def add(self, batch: Batch) -> None:
        """Records steps of this batch's size; it may hold any values that may be run."""
        copies: dict[str, Any] = {name: value.clone() for name, value in _tensors(batch).items()}
        inputs = dataclasses.replace(batch, **copies)
        replay = self._record(lambda: self._forward(inputs))
        size = len(inputs.input_ids)
        self._recorded[size] = _Recorded(inputs, replay)
        bisect.insort(self._sizes, size)

    def size_for(self, rows: int) -> int | None:
        """The smallest recorded size that holds ``rows`` rows."""
        place = bisect.bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else None

    def run(self, batch: Batch) -> torch.Tensor:
        """Hidden states of a batch of a recorded size, as ``forward`` would give them."""
        recorded = self._recorded[len(batch.input_ids)]
        inputs = recorded.inputs
        assert (batch.max_seqlen_q, batch.max_seq_len) == (inputs.max_seqlen_q, inputs.max_seq_len)
        targets = _tensors(inputs)
        for name, values in _tensors(batch).items():
            targets[name].copy_(values, non_blocking=True)
        return recorded.replay()


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
