"""What Triton's /metrics tells of the engine, under vLLM's names.

Owned by the output thread alone, like everything else that asks the server something while requests are
in flight; only creating and dropping happen on the main thread, before the first request and after the
last. An update of a metric is a round trip to the server (some 25 us), so nothing is updated where it
happens: counters and per-token times are added up here and pushed every half second, per-request times
every tick, gauges only when they changed. There is no hook for a scrape, and nothing may be asked once
the last request in flight has its final flag: so :meth:`Metrics.push_idle` comes just before that flag
and tells what will be true after it.

Every request that was accepted is counted once by its outcome: ``vllm:request_success_total``,
``trident:request_errors_total`` or ``trident:control_requests_total``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import triton_python_backend_utils as pb_utils

from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.output import RequestOutput
from trident_llm.serving.metric_kinds import (
    TOKEN_BUCKETS,
    Counter,
    Families,
    Gauge,
    Histogram,
    TokenHistogram,
)

logger = logging.getLogger("trident")

PUSH_SECONDS = 0.5

M = TypeVar("M", bound="RequestMetrics")

_TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
)  # fmt: skip
_N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class EngineState:
    """What the engine counts, at one moment; totals are since the start."""

    num_running: int
    num_waiting: int
    # Of a model that generates; prefix queries and hits are in tokens.
    num_held_blocks: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    healthy: bool = True
    recomputed_tokens: int = 0


@dataclass
class RequestProgress:
    """What has to be remembered of a request between two of its responses."""

    num_tokens: int = 0  # in all its responses
    first_token: float = 0.0  # time.monotonic() seconds
    last_token: dict[int, float] = field(default_factory=dict)  # by sequence, when it was sent
    _hit_length: bool = False  # a sequence ended for its length

    def take(self, output: RequestOutput) -> None:
        """Tokens are about to be sent."""
        for delta in output.deltas.values():
            self.num_tokens += len(delta.token_ids)
            self._hit_length |= delta.finish_reason is FinishReason.LENGTH

    @property
    def outcome(self) -> str:
        """Why a request ended that ended with a result."""
        return "length" if self._hit_length else "stop"


def token_buckets(max_model_len: int) -> list[float]:
    """1, 2, 5, 10, ... up to the longest request."""
    buckets: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_len and buckets:
                return buckets
            buckets.append(float(step * scale))
        scale *= 10


class RequestMetrics:
    """The metrics of a model instance of any kind; enough for one that embeds.

    Args:
        labels: ``model``, ``version``, ``model_name`` and ``engine``, the instance's name.
        state: reads what the engine counts; called on the output thread.

    Raises:
        pb_utils.TritonModelException: the server keeps no metrics.
    """

    _FINISH_REASONS: tuple[str, ...] = ("stop",)

    def __init__(
        self, labels: Mapping[str, str], state: Callable[[], EngineState], *, max_model_len: int
    ) -> None:
        self._state = state
        self._families = families = Families(labels)
        self._token_bounds = token_buckets(max_model_len)
        self._next_push = 0.0
        self._make_counters(families)
        self._make_gauges(families)
        self._make_histograms(families)
        self._show(EngineState(0, 0))

    def _make_counters(self, families: Families) -> None:
        def counter(name: str, description: str) -> Counter:
            return Counter(families.counter(name, description))

        self._prompt_tokens = counter("vllm:prompt_tokens_total", "Prompt tokens processed")
        self._controls = counter(
            "trident:control_requests_total", "Control operations answered (tokenize, stats, ...)"
        )
        success = families.family(
            "vllm:request_success_total", "Requests that ended with a result, by finished_reason"
        )
        self._success = {
            reason: Counter(families.metric(success, finished_reason=reason))
            for reason in self._FINISH_REASONS
        }
        errors = families.family(
            "trident:request_errors_total", "Requests that ended with an error, by its code"
        )
        self._errors = {
            code: Counter(families.metric(errors, code=code.value)) for code in ErrorCode
        }

    def _make_gauges(self, families: Families) -> None:
        self._running = families.gauge("vllm:num_requests_running", "Sequences being computed")
        self._waiting = families.gauge("vllm:num_requests_waiting", "Requests waiting for a place")
        self._healthy = families.gauge("trident:engine_healthy", "1 while the engine computes")

    def _make_histograms(self, families: Families) -> None:
        times, make = _REQUEST_BUCKETS, families.histogram
        self._e2e = make("vllm:e2e_request_latency_seconds", "Arrival to last token", times)
        self._queue = make("vllm:request_queue_time_seconds", "Arrival to first step", times)
        self._prefill = make(
            "vllm:request_prefill_time_seconds", "First step to first token", times
        )
        self._request_prompt = make(
            "vllm:request_prompt_tokens", "Tokens of a prompt", self._token_bounds
        )

    # ---- what happens to requests ---------------------------------------------------------------

    def sent(self, progress: RequestProgress, output: RequestOutput, now: float) -> None:
        """A response is about to be sent."""

    def finished(
        self, progress: RequestProgress, output: RequestOutput, params: SamplingParams, now: float
    ) -> None:
        """A request ends with a result."""
        times = output.times
        if not times.first_token:  # it asked for none
            self._prompt_tokens.add(output.num_prompt_tokens)
        self._success[progress.outcome].add()
        self._e2e.observe(now - times.arrival)
        self._queue.observe(times.first_scheduled - times.arrival)
        self._prefill.observe((times.first_token or times.finished) - times.first_scheduled)
        self._request_prompt.observe(output.num_prompt_tokens)

    def failed(self, code: ErrorCode) -> None:
        """A request ends with an error."""
        self._errors[code].add()

    def controlled(self) -> None:
        """A control operation was answered."""
        self._controls.add()

    # ---- to the server --------------------------------------------------------------------------

    def push(self, now: float) -> None:
        """Tells the server what is due; call only while a request is without its final flag."""
        for histogram in self._request_histograms():
            histogram.push()
        if now >= self._next_push:
            self._next_push = now + PUSH_SECONDS
            self._push_totals(self._state())

    def push_idle(self) -> None:
        """Tells the server everything, as it is once the request in flight has its final flag."""
        for histogram in self._request_histograms():
            histogram.push()
        idle = replace(self._state(), num_running=0, num_waiting=0, num_held_blocks=0)
        self._push_totals(idle)

    def drop(self) -> None:
        """Lets go of the server's metrics, while it still listens; nothing else may be called then."""
        families = self._families
        vars(self).clear()  # a metric must not outlive its family
        families.drop()

    def _request_histograms(self) -> Iterable[Histogram]:
        return (self._e2e, self._queue, self._prefill, self._request_prompt)

    def _counters(self) -> Iterable[Counter]:
        return (
            self._prompt_tokens, self._controls, *self._success.values(), *self._errors.values(),
        )  # fmt: skip

    def _push_totals(self, state: EngineState) -> None:
        self._show(state)
        for counter in self._counters():
            counter.push()

    def _show(self, state: EngineState) -> None:
        self._running.show(state.num_running)
        self._waiting.show(state.num_waiting)
        self._healthy.show(float(state.healthy))


class Metrics(RequestMetrics):
    """All metrics of a model instance that generates; see :class:`RequestMetrics`.

    Args:
        num_blocks: blocks of the KV pool that can be held.
    """

    _FINISH_REASONS = ("stop", "length")

    def __init__(
        self,
        labels: Mapping[str, str],
        state: Callable[[], EngineState],
        *,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self._num_blocks = num_blocks
        super().__init__(labels, state, max_model_len=max_model_len)
        self._blocks["max"].show(num_blocks)
        self._blocks["tokens_per"].show(block_size)

    def _make_counters(self, families: Families) -> None:
        super()._make_counters(families)

        def counter(name: str, description: str) -> Counter:
            return Counter(families.counter(name, description))

        self._generation_tokens = counter("vllm:generation_tokens_total", "Tokens generated")
        self._preemptions = counter(
            "vllm:num_preemptions_total", "Sequences put back into the queue for want of KV blocks"
        )
        self._recomputed = counter(
            "trident:recomputed_tokens_total", "Tokens to compute again after such a preemption"
        )
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache"
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits_total", "Tokens found in the prefix cache"
        )

    def _make_gauges(self, families: Families) -> None:
        super()._make_gauges(families)
        self._usage = families.gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV blocks that are held; 1 is all"
        )
        # Under this name Triton's HTTP front end finds what it tells load balancers (ORCA headers).
        blocks = families.family(
            "nv_trt_llm_kv_cache_block_metrics", "KV cache block metrics", "GAUGE"
        )
        self._blocks = {
            kind: Gauge(families.metric(blocks, kv_cache_block_type=kind))
            for kind in ("used", "free", "max", "tokens_per", "fraction")
        }

    def _make_histograms(self, families: Families) -> None:
        super()._make_histograms(families)
        times, tokens, make = _REQUEST_BUCKETS, self._token_bounds, families.histogram
        self._ttft = make(
            "vllm:time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS
        )
        self._decode = make("vllm:request_decode_time_seconds", "First to last token", times)
        self._mean_gap = make(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between tokens", TOKEN_BUCKETS,
        )  # fmt: skip
        self._request_generation = make(
            "vllm:request_generation_tokens", "Tokens generated for a request", tokens
        )
        self._params_n = make("vllm:request_params_n", "Sequences asked for", _N_BUCKETS)
        self._params_max_tokens = make(
            "vllm:request_params_max_tokens", "Most tokens asked for", tokens
        )
        # The same times under the older and the newer of vLLM's names.
        self._gaps = [
            TokenHistogram(families, f"vllm:{name}_seconds", "Time between two tokens")
            for name in ("time_per_output_token", "inter_token_latency")
        ]

    def sent(self, progress: RequestProgress, output: RequestOutput, now: float) -> None:
        """``progress`` has taken tokens that are about to be sent.

        Tokens that go out together share the time since the last.
        """
        if not progress.first_token and output.times.first_token:
            progress.first_token = output.times.first_token
            self._prompt_tokens.add(output.num_prompt_tokens)
            self._ttft.observe(output.times.first_token - output.times.arrival)
        for index, delta in output.deltas.items():
            count = len(delta.token_ids)
            if not count:
                continue
            self._generation_tokens.add(count)
            last = progress.last_token.get(index)
            if last is None:  # its first token ended no gap
                last, count = progress.first_token, count - 1
            progress.last_token[index] = now
            if count:
                for histogram in self._gaps:
                    histogram.observe((now - last) / count, count)

    def finished(
        self, progress: RequestProgress, output: RequestOutput, params: SamplingParams, now: float
    ) -> None:
        """A request ends with a result."""
        super().finished(progress, output, params, now)
        times = output.times
        self._decode.observe(times.finished - (times.first_token or times.finished))
        per_sequence = progress.num_tokens / params.n
        if per_sequence > 1:
            self._mean_gap.observe((times.finished - times.first_token) / (per_sequence - 1))
        self._request_generation.observe(progress.num_tokens)
        self._params_n.observe(params.n)
        self._params_max_tokens.observe(params.max_tokens or 0)

    def _request_histograms(self) -> Iterable[Histogram]:
        return (
            *super()._request_histograms(), self._ttft, self._decode, self._mean_gap,
            self._request_generation, self._params_n, self._params_max_tokens,
        )  # fmt: skip

    def _counters(self) -> Iterable[Counter]:
        return (
            *super()._counters(), self._generation_tokens, self._preemptions, self._recomputed,
            self._prefix_queries, self._prefix_hits,
        )  # fmt: skip

    def _push_totals(self, state: EngineState) -> None:
        self._preemptions.advance_to(state.num_preemptions)
        self._recomputed.advance_to(state.recomputed_tokens)
        self._prefix_queries.advance_to(state.prefix_queries)
        self._prefix_hits.advance_to(state.prefix_hits)
        super()._push_totals(state)
        for histogram in self._gaps:
            histogram.push()

    def _show(self, state: EngineState) -> None:
        super()._show(state)
        usage = state.num_held_blocks / self._num_blocks
        self._usage.show(usage)
        self._blocks["used"].show(state.num_held_blocks)
        self._blocks["free"].show(self._num_blocks - state.num_held_blocks)
        self._blocks["fraction"].show(usage)


def create_metrics(make: Callable[[], M]) -> M | None:
    """The metrics of an instance, as ``make`` makes them; None on a server that keeps none."""
    try:
        return make()
    except pb_utils.TritonModelException as error:
        if "metrics not supported" not in str(error):
            logger.warning("there will be no metrics: %s", error)
        return None
