"""What is told to the server, when, and in how many round trips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.serving.fake_triton import ServerMetrics
from tests.serving.outputs import make_output, token
from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.output import RequestTimes, SequenceDelta
from trident_llm.serving.metrics import (
    EngineState,
    Metrics,
    RequestMetrics,
    RequestProgress,
    create_metrics,
    token_buckets,
)

LABELS = {"model": "llm", "version": "1", "model_name": "llm", "engine": "llm_0_0"}
BUSY = EngineState(
    num_running=3, num_waiting=2, num_held_blocks=25, num_preemptions=4, prefix_queries=100,
    prefix_hits=40, healthy=True,
)  # fmt: skip
TIMES = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=11.0, finished=14.0)


def make(state: EngineState = BUSY) -> Metrics:
    metrics = create_metrics(
        lambda: Metrics(LABELS, lambda: state, max_model_len=1000, num_blocks=100, block_size=16)
    )
    assert metrics is not None
    return metrics


def run_request(metrics: Metrics, params: SamplingParams, *steps: Any) -> None:
    """Steps are (time of sending, deltas); the last one ends the request."""
    progress = RequestProgress()
    times = TIMES if params.max_tokens else replace(TIMES, first_token=0.0)
    for number, (now, *deltas) in enumerate(steps, start=1):
        output = make_output("1", *deltas, finished=number == len(steps), times=times)
        progress.take(output)
        metrics.sent(progress, output, now)
        if output.finished:
            metrics.finished(progress, output, params, now)


def test_a_request_that_generates_nothing(server_metrics: ServerMetrics) -> None:
    metrics = make()
    nothing = SequenceDelta(0, finish_reason=FinishReason.LENGTH)
    run_request(metrics, SamplingParams(max_tokens=0), (14.0, nothing))
    metrics.push_idle()
    told = server_metrics
    assert told["vllm:prompt_tokens_total"].value == 5
    assert told["vllm:generation_tokens_total"].value == 0
    assert told["vllm:time_to_first_token_seconds"].values == []
    assert told["vllm:request_prefill_time_seconds"].values == [3.5]
    assert told["vllm:request_decode_time_seconds"].values == [0.0]
    assert told["vllm:request_generation_tokens"].values == [0]


def test_a_request_is_counted_once_with_its_tokens_and_times(server_metrics: ServerMetrics) -> None:
    metrics = make()
    params = SamplingParams(max_tokens=4)
    run_request(
        metrics, params, (11.0, token("a")), (12.0, token("b")), (13.0, token("c")),
        (14.0, token("d", end=FinishReason.LENGTH)),
    )  # fmt: skip
    metrics.push_idle()
    told = server_metrics
    assert told["vllm:prompt_tokens_total"].value == 5
    assert told["vllm:generation_tokens_total"].value == 4
    assert told.labelled("vllm:request_success_total", finished_reason="length").value == 1
    assert told.labelled("vllm:request_success_total", finished_reason="stop").value == 0
    assert told["vllm:time_to_first_token_seconds"].values == [1.0]
    assert told["vllm:request_queue_time_seconds"].values == [0.5]
    assert told["vllm:request_prefill_time_seconds"].values == [0.5]
    assert told["vllm:request_decode_time_seconds"].values == [3.0]
    assert told["vllm:request_time_per_output_token_seconds"].values == [1.0]
    assert told["vllm:e2e_request_latency_seconds"].values == [4.0]
    assert told["vllm:request_prompt_tokens"].values == [5]
    assert told["vllm:request_generation_tokens"].values == [4]
    assert told["vllm:request_params_n"].values == [1]
    assert told["vllm:request_params_max_tokens"].values == [4]
    for name in ("time_per_output_token", "inter_token_latency"):
        assert told[f"vllm:{name}_seconds_count"].value == 3
        assert told[f"vllm:{name}_seconds_sum"].value == 3.0
        assert told.labelled(f"vllm:{name}_seconds_bucket", le="1").value == 3
        assert told.labelled(f"vllm:{name}_seconds_bucket", le="0.75").value == 0
        assert told.labelled(f"vllm:{name}_seconds_bucket", le="+Inf").value == 3


@pytest.mark.parametrize(
    ("steps", "count", "total"),
    [
        # Not streamed: everything comes at once, and the first token ends no gap.
        ([(14.0, SequenceDelta(0, "abcd", [1, 2, 3, 4]))], 3, 3.0),
        ([(11.5, SequenceDelta(0, "ab", [1, 2])), (13.5, SequenceDelta(0, "cd", [3, 4]))], 3, 2.5),
        # Two sequences have a first token each.
        ([(11.0, token("a"), token("b", 1)), (12.0, token("c"), token("d", 1))], 2, 2.0),
    ],
)
def test_tokens_sent_together_share_the_time(
    server_metrics: ServerMetrics, steps: Any, count: int, total: float
) -> None:
    metrics = make()
    run_request(metrics, SamplingParams(), *steps)
    metrics.push_idle()
    assert server_metrics["vllm:inter_token_latency_seconds_count"].value == count
    assert server_metrics["vllm:inter_token_latency_seconds_sum"].value == pytest.approx(total)


def test_with_several_sequences_one_that_ran_out_makes_it_length(
    server_metrics: ServerMetrics,
) -> None:
    metrics = make()
    run_request(
        metrics, SamplingParams(n=2),
        (11.0, token("a", 0, FinishReason.LENGTH), token("b", 1)),
        (12.0, token("c", 1, FinishReason.STOP)),
    )  # fmt: skip
    metrics.push_idle()
    assert (
        server_metrics.labelled("vllm:request_success_total", finished_reason="length").value == 1
    )


def test_gauges_show_the_engine_and_nothing_once_idle(server_metrics: ServerMetrics) -> None:
    metrics = make()
    metrics.push(now=1.0)
    told = server_metrics
    assert told["vllm:num_requests_running"].value == 3
    assert told["vllm:num_requests_waiting"].value == 2
    assert told["vllm:kv_cache_usage_perc"].value == 0.25
    assert told["vllm:num_preemptions_total"].value == 4
    assert told["vllm:prefix_cache_queries_total"].value == 100
    assert told["vllm:prefix_cache_hits_total"].value == 40
    kinds = ("used", "free", "max", "tokens_per", "fraction")
    blocks = [
        told.labelled("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind).value
        for kind in kinds
    ]
    assert blocks == [25, 75, 100, 16, 0.25]
    metrics.push_idle()
    assert told["vllm:num_requests_running"].value == told["vllm:num_requests_waiting"].value == 0
    assert told["vllm:kv_cache_usage_perc"].value == 0
    assert told["trident:engine_healthy"].value == 1
    assert told["vllm:num_preemptions_total"].value == 4


def test_every_outcome_has_its_counter(server_metrics: ServerMetrics) -> None:
    metrics = make()
    for code in ErrorCode:
        metrics.failed(code)
    metrics.controlled()
    metrics.push_idle()
    for code in ErrorCode:
        counter = server_metrics.labelled("trident:request_errors_total", code=code.value)
        assert counter.value == 1
    assert server_metrics["trident:control_requests_total"].value == 1


def test_totals_are_told_every_half_second_and_only_what_changed(
    server_metrics: ServerMetrics,
) -> None:
    metrics = make()
    metrics.push(now=1.0)
    before = server_metrics.num_calls
    metrics.push(now=2.0)
    assert server_metrics.num_calls == before
    metrics.failed(ErrorCode.INTERNAL)
    metrics.push(now=2.3)
    assert server_metrics.num_calls == before
    metrics.push(now=2.6)
    assert server_metrics.num_calls == before + 1


def test_a_thousand_tokens_cost_no_more_round_trips_than_one(server_metrics: ServerMetrics) -> None:
    metrics, progress = make(), RequestProgress()
    costs = []
    for count in (2, 1000):
        before = server_metrics.num_calls
        for step in range(count):
            metrics.sent(progress, make_output("1", token("a"), times=TIMES), 11.0 + step * 0.001)
        metrics.push_idle()
        costs.append(server_metrics.num_calls - before)
    assert costs[1] <= costs[0]


def test_a_server_without_metrics_has_none(
    server_metrics: ServerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    server_metrics.supported = False
    assert create_metrics(lambda: RequestMetrics(LABELS, lambda: BUSY, max_model_len=10)) is None
    assert caplog.text == ""


def test_all_carry_the_labels_of_their_instance(server_metrics: ServerMetrics) -> None:
    make()
    assert len(server_metrics.metrics) > 25
    for metrics in server_metrics.metrics.values():
        for labels, _ in metrics:
            assert labels.items() >= LABELS.items()


@pytest.mark.parametrize(("longest", "last"), [(1, 1), (10, 10), (999, 500), (1000, 1000)])
def test_token_buckets_reach_the_longest_request(longest: int, last: float) -> None:
    buckets = token_buckets(longest)
    assert buckets[0] == 1
    assert buckets[-1] == last
    assert buckets == sorted(buckets)
