"""What a model sees of Triton, recorded: responses sent, metrics told, questions asked.

``install`` fills the module that exists only inside Triton's stub process.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = 1, 2, 3, 4

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array


@dataclass
class InferenceResponse:
    output_tensors: Sequence[Tensor]
    error: TritonError | None = None

    def __getitem__(self, name: str) -> Any:
        (found,) = [tensor for tensor in self.output_tensors if tensor.name() == name]
        return found.as_numpy()


class Sender:
    """Refuses what Triton refuses: anything after the final flag."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.finals = 0
        self.cancelled = False
        self.polls = 0
        self.failing = 0  # sends to fail from now on

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.finals, "sent after the final flag"
        if self.failing:
            self.failing -= 1
            raise TritonModelException("no shared memory")
        if response is not None:
            self.responses.append(response)
        self.finals += flags == FINAL

    def is_cancelled(self) -> bool:
        assert not self.finals, "asked after the final flag"
        self.polls += 1
        return self.cancelled


class Metric:
    def __init__(self, kind: int, buckets: Sequence[float] | None) -> None:
        self.kind = kind
        self.buckets = buckets
        self.value = 0.0
        self.values: list[float] = []
        self.calls = 0

    def increment(self, amount: float) -> None:
        assert self.kind == MetricFamily.COUNTER and amount > 0
        self.calls += 1
        self.value += amount

    def set(self, value: float) -> None:
        assert self.kind == MetricFamily.GAUGE
        self.calls += 1
        self.value = value

    def observe(self, value: float) -> None:
        assert self.kind == MetricFamily.HISTOGRAM
        self.calls += 1
        self.values.append(value)


@dataclass
class ServerMetrics:
    """All metrics of a fake server, by name and labels."""

    metrics: dict[str, list[tuple[Mapping[str, str], Metric]]] = field(default_factory=dict)
    supported: bool = True

    def __getitem__(self, name: str) -> Metric:
        (found,) = [metric for _, metric in self.metrics[name]]
        return found

    def labelled(self, name: str, **labels: str) -> Metric:
        (found,) = [m for given, m in self.metrics[name] if labels.items() <= given.items()]
        return found

    @property
    def num_calls(self) -> int:
        return sum(metric.calls for metrics in self.metrics.values() for _, metric in metrics)


server_metrics = ServerMetrics()


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = 0, 1, 2

    def __init__(self, name: str, description: str, kind: int) -> None:
        if not server_metrics.supported:
            raise TritonModelException("metrics not supported")
        assert name not in server_metrics.metrics, f"{name} is made twice"
        server_metrics.metrics[name] = []
        self._name, self._kind = name, kind

    def Metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Metric:
        assert (buckets is not None) == (self._kind == self.HISTOGRAM)
        made = Metric(self._kind, buckets)
        server_metrics.metrics[self._name].append((labels, made))
        return made


def install(module: types.ModuleType) -> None:
    for name in (
        "InferenceResponse", "MetricFamily", "Tensor", "TritonError", "TritonModelException",
    ):  # fmt: skip
        setattr(module, name, globals()[name])
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL  # type: ignore[attr-defined]
    module.using_decoupled_model_transaction_policy = _is_decoupled  # type: ignore[attr-defined]


def _is_decoupled(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config["model_transaction_policy"]["decoupled"])


def texts(response: InferenceResponse) -> list[str]:
    return [bytes(item).decode() for item in np.asarray(response["text_output"])]
