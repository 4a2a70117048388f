"""An engine in the test's own thread, and what its requests came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trident_llm.core.config import parse_engine_config
from trident_llm.core.errors import RequestError
from trident_llm.core.request import FinishReason, Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.engine.engine import Engine
from trident_llm.engine.output import RequestOutput
from trident_llm.model.executor import Executor
from trident_llm.text.tokenizer import Tokenizer


@dataclass
class Outcome:
    """Everything one sequence's deltas said."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: RequestError | None = None
    num_deltas: int = 0
    prompt_logprobs: list[Any] | None = None  # of the request, kept with its sequence 0


def make_engine(folder: Path, *, launch_depth: int | None = None, **settings: Any) -> Engine:
    config, _ = parse_engine_config({"model": str(folder), "dtype": "float32", **settings})
    tokenizer = Tokenizer.from_folder(folder)
    executor = Executor.load(
        config, vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id
    )
    depth = executor.limits.launch_depth if launch_depth is None else launch_depth
    return Engine(executor, executor.scheduler_config(config), tokenizer, launch_depth=depth)


class Harness:
    """Adds requests and collects their outcomes by (request id, sequence index)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.finished: list[str] = []
        self._count = 0

    def add(self, prompt: list[int], **params: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        values = {"temperature": 0.0, "ignore_eos": True, "seed": 0, "max_tokens": 8, **params}
        salt, grammar = values.pop("salt", ""), values.pop("grammar", None)
        request = Request(name, prompt, SamplingParams(**values), cache_salt=salt)
        self.engine.add(request, grammar=grammar)
        return name

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        for output in outputs:
            assert output.request_id not in self.finished, "news after the end"
            if output.finished:
                self.finished.append(output.request_id)
            if output.error is not None:
                self.outcomes.setdefault((output.request_id, 0), Outcome()).error = output.error
            if output.prompt_logprobs is not None:
                outcome = self.outcomes.setdefault((output.request_id, 0), Outcome())
                assert outcome.num_deltas == 0, (
                    "prompt log-probabilities come with the first output"
                )
                outcome.prompt_logprobs = output.prompt_logprobs
            for index, delta in output.deltas.items():
                outcome = self.outcomes.setdefault((output.request_id, index), Outcome())
                outcome.text += delta.text
                outcome.token_ids += delta.token_ids
                outcome.logprobs += delta.logprobs
                outcome.cumulative_logprob = delta.cumulative_logprob
                outcome.finish_reason = delta.finish_reason
                outcome.stop_reason = delta.stop_reason
                outcome.num_cached_tokens = output.num_cached_tokens
                outcome.num_deltas += 1
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.scheduler.check_integrity() == []
        assert self.engine.scheduler.pool.num_held == 0

    def generate(self, prompt: list[int], **params: Any) -> Outcome:
        name = self.add(prompt, **params)
        self.run()
        return self.outcomes[name, 0]
