"""OpenVINO GenAI's continuous batching.

The model is one that `optimum-cli export openvino --task text-generation-with-past --weight-format fp16`
(or int8) has written; it computes in bfloat16:

    PYTHON -m perf.peers.openvino_peer --model FOLDER --worker
"""

from __future__ import annotations

import argparse
from typing import Any

from perf import peers
from perf.workloads import RequestSpec


class OpenVinoPeer:
    """A pipeline with its prefix cache and 4 GiB of KV."""

    def __init__(self, given: argparse.Namespace) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": peers.THREADS, "INFERENCE_PRECISION_HINT": "bf16",
        }  # fmt: skip
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            given.model, scheduler, "CPU", properties
        )
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def add(self, key: int, spec: RequestSpec) -> None:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        config = openvino_genai.GenerationConfig(
            max_new_tokens=spec.output_len, min_new_tokens=spec.output_len, ignore_eos=True,
            do_sample=False,
        )  # fmt: skip
        ids = openvino.Tensor(numpy.array([spec.prompt], dtype=numpy.int64))
        self._handles[key] = self._pipeline.add_request(key, ids, config)
        self._left[key] = spec.output_len

    def step(self) -> list[tuple[int, int]]:
        self._pipeline.step()
        came = []
        for key, handle in list(self._handles.items()):
            while handle.can_read():
                tokens = len(next(iter(handle.read().values())).generated_ids)
                came.append((key, tokens))
                self._left[key] -= tokens
            if self._left[key] <= 0:
                del self._handles[key], self._left[key]
        return came


if __name__ == "__main__":
    peers.main(__doc__, OpenVinoPeer, "model")
