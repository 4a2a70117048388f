"""Reads what a server tells at /metrics."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

_LINE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Scrape:
    """One reading of all metrics."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
        self.samples = [
            Sample(
                match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
            )
            for line in text.splitlines()
            if (match := _LINE.fullmatch(line))
        ]

    def find(self, name: str, **labels: str) -> list[Sample]:
        return [
            sample
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def outcomes(self, model: str = "llm") -> dict[str, float]:
        """How many requests ended, by what became of them; each is counted by one of these."""
        codes = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")
        return {
            "result": self.total("vllm:request_success_total", model=model),
            "control": self.total("trident:control_requests_total", model=model),
            **{
                code: self.total("trident:request_errors_total", code=code, model=model)
                for code in codes
            },
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum over the series that have these labels; fails if there is none."""
        found = self.find(name, **labels)
        assert found, f"no series {name} {labels}"
        return sum(sample.value for sample in found)
