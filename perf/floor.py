"""How near an engine comes to its floor: the products and the attention of its own steps, and nothing else.

    python -m perf.floor --workloads W1,W2

After every step its products (all linear layers, the head) and its attention are done again alone, on the
same rows and the same cache: that is the measured floor. The computed one is made of the same step's FLOPs
and bytes, each operation taking the longer of the two times at the rates measured at the start (the best
of a product of 512 rows; the best of reading 1 GiB). Both shares are of the time of the engine's steps:
100 % would be an engine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import trident_kernels as ops
from perf import options, report, workloads
from perf.engine import load
from perf.workloads import RequestSpec
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.engine import Engine
from trident_llm.model.batch import Batch


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured."""

    flops: float  # a second, in a product of 512 rows
    read: float  # bytes a second, from memory


def measure_rates(weight: ops.LinearWeight) -> Rates:
    """The rates with a weight of the model's own layout."""
    x = torch.randn(512, weight.in_features).to(torch.bfloat16)
    product = 2 * 512 * weight.in_features * weight.out_features
    memory = torch.ones(1 << 28)
    return Rates(
        flops=product / _best(lambda: ops.linear(x, weight), 30),
        read=memory.nbytes / _best(memory.sum, 5),
    )


def _best(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class Floor:
    """The products and the attention of a step, alone."""

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine._executor.runner  # type: ignore[attr-defined]
        self.decoder, self._kv = runner.decoder, runner.kv_cache
        self._weights = self.decoder._weights
        self._batch: Batch | None = None
        hidden = self.decoder.hidden

        def record(batch: Batch, kv: Any) -> torch.Tensor:
            self._batch = batch
            result: torch.Tensor = hidden(batch, kv)
            return result

        self.decoder.hidden = record

    def take_batch(self) -> Batch | None:
        """That of the last step, once."""
        batch, self._batch = self._batch, None
        return batch

    def _products(self, batch: Batch) -> list[tuple[ops.LinearWeight, int]]:
        """All linear layers with their rows."""
        tokens, logits = len(batch.input_ids), len(batch.logits_indices)
        products = []
        for number, layer in enumerate(self._weights.layers):
            rest = logits if number + 1 == len(self._weights.layers) else tokens
            products += [(layer.qkv, tokens), (layer.output, rest)]
            products += [(layer.gate_up, rest), (layer.down, rest)]
        return [*products, (self._weights.head, logits)]

    @torch.inference_mode()
    def measure(self, batch: Batch) -> float:
        """Seconds of the operations one by one."""
        config = self.decoder.config
        dtype = self.decoder.dtype
        inputs = {
            (rows, weight.in_features): torch.randn(rows, weight.in_features).to(dtype)
            for weight, rows in self._products(batch)
        }
        query = torch.randn(len(batch.input_ids), config.num_heads, config.head_dim).to(dtype)
        began = time.perf_counter()
        for weight, rows in self._products(batch):
            ops.linear(inputs[rows, weight.in_features], weight)
        for index, window in enumerate(config.sliding_windows):
            keys, values = self._kv.layer(index)
            ops.paged_attention(
                query, keys, values, batch.block_tables, batch.cu_seqlens_q,
                batch.seq_lens, batch.max_seqlen_q, batch.max_seq_len, config.head_dim**-0.5,
                sliding_window=window,
            )  # fmt: skip
        return time.perf_counter() - began

    def compute(self, batch: Batch, rates: Rates) -> float:
        """Seconds by FLOPs and bytes; windows are not looked at."""
        config = self.decoder.config
        seconds = 0.0
        for weight, rows in self._products(batch):
            flops = 2 * rows * weight.in_features * weight.out_features
            seconds += max(flops / rates.flops, weight.weight.nbytes / rates.read)
        counts = batch.cu_seqlens_q.diff().double()
        lens = batch.seq_lens.double()
        # Query i of n sees the keys up to its own: on average (n - 1) / 2 fewer than the last one.
        pairs = float((counts * (lens - (counts - 1) / 2)).sum())
        flops = 4 * config.head_dim * config.num_heads * pairs
        size = 2 * config.num_kv_heads * config.head_dim * self.decoder.dtype.itemsize
        attention = max(flops / rates.flops, float(lens.sum()) * size / rates.read)
        return float(seconds + config.num_layers * attention)


def run(
    engine: Engine, floor: Floor, specs: Sequence[RequestSpec], rates: Rates
) -> dict[str, float]:
    """Shares of one run of requests that all come at once. Raises RuntimeError if one fails."""
    for number, spec in enumerate(specs):
        params = SamplingParams(
            temperature=0.0, max_tokens=spec.output_len, seed=0, ignore_eos=True
        )
        engine.add(Request(str(number), list(spec.prompt), params))
    wall = measured = computed = 0.0
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        wall += time.perf_counter() - began
        if any(output.error for output in outputs):
            raise RuntimeError(
                f"a request failed: {[output.error for output in outputs if output.error]}"
            )
        batch = floor.take_batch()
        if batch is not None:
            measured += floor.measure(batch)
            computed += floor.compute(batch, rates)
    return {
        "wall_s": round(wall, 3),
        "output_tokens_per_s": round(sum(spec.output_len for spec in specs) / wall, 1),
        "measured_floor_s": round(measured, 3),
        "measured_floor_percent": round(100 * measured / wall, 1),
        "computed_floor_s": round(computed, 3),
        "computed_floor_percent": round(100 * computed / wall, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.floor", description=__doc__)
    options.add_workload_options(parser, default="W1,W2")
    options.add_model_options(parser)
    options.add_output_option(parser)
    given = parser.parse_args(arguments)
    settings = options.model_settings(given)
    loaded = load(settings)
    floor = Floor(loaded.engine)
    rates = measure_rates(floor.decoder._weights.layers[0].gate_up)
    report.say(
        f"products {rates.flops / 1e9:.0f} GFLOP/s, memory {rates.read / 1e9:.1f} GB/s; "
        f"{loaded.limits}"
    )
    warm_up = workloads.warm_up(vocab_size=loaded.vocab_size)
    run(loaded.engine, floor, warm_up, rates)

    def one(name: str, repetition: int) -> dict[str, float]:
        specs = workloads.make(name, repetition, vocab_size=loaded.vocab_size)
        found = run(loaded.engine, floor, specs, rates)
        report.say(
            f"{name}: measured floor {found['measured_floor_percent']:g} % of the time, computed "
            f"{found['computed_floor_percent']:g} %"
        )
        return found

    figures = options.repeat(one, given.workloads, given.repetitions)
    content = {
        "effective": loaded.limits,
        "gflop_per_s": round(rates.flops / 1e9, 1),
        "read_gb_per_s": round(rates.read / 1e9, 1),
        "workloads": figures,
    }
    report.publish(report.result("floor", settings, content), given.output)


if __name__ == "__main__":
    main()
