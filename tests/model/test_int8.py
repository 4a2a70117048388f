"""The default model with linear layers in 8 bits: as good as before, and in less memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import trident_kernels as ops
from tests.engine.harness import Harness, make_engine
from trident_llm.core.config import parse_engine_config
from trident_llm.core.errors import ConfigError
from trident_llm.model.executor import check_quantization
from trident_llm.text.tokenizer import Tokenizer

needs_int8 = pytest.mark.skipif(not ops.can_quantize(), reason="this CPU does not multiply int8")


def perplexity(folder: Path, ids: list[int], **settings: str) -> float:
    """Of a text in pieces of 500 tokens."""
    harness = Harness(make_engine(folder, num_blocks=80, **settings))
    total, count = 0.0, 0
    for start in range(0, len(ids), 500):
        outcome = harness.generate(ids[start : start + 500], max_tokens=0, prompt_logprobs=0)
        assert outcome.prompt_logprobs is not None
        logprobs = [entries[0].logprob for entries in outcome.prompt_logprobs[1:]]
        total, count = total - sum(logprobs), count + len(logprobs)
    assert count == len(ids) - -(-len(ids) // 500)
    return math.exp(total / count)


@needs_int8
def test_perplexity_stays_within_one_percent(default_model: Path) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = Tokenizer.from_folder(default_model).encode(text)
    exact = perplexity(default_model, ids)
    for dtype in ("float32", "bfloat16"):
        rounded = perplexity(default_model, ids, quantization="int8", dtype=dtype)
        assert abs(rounded / exact - 1) < 0.01
    assert abs(perplexity(default_model, ids, dtype="bfloat16") / exact - 1) < 0.005


@needs_int8
def test_an_answer_is_the_same_alone_and_among_others(default_model: Path) -> None:
    engine = make_engine(default_model, quantization="int8", num_blocks=120, max_num_seqs=16)
    harness = Harness(engine)
    prompts = [[100 + i, 200, 300 + i] * (1 + i) for i in range(8)]
    alone = [harness.generate(prompt, max_tokens=12).token_ids for prompt in prompts]
    names = [harness.add(prompt, max_tokens=12) for prompt in prompts]
    harness.run()
    assert [harness.outcomes[name, 0].token_ids for name in names] == alone


def test_a_device_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = parse_engine_config({"model": "/m", "quantization": "int8"})
    with pytest.raises(ConfigError, match="quantization int8 needs a CPU"):
        check_quantization(config, torch.device("cuda"))
    monkeypatch.setattr("trident_llm.model.executor.can_quantize", lambda: False)
    with pytest.raises(ConfigError, match="AVX-512 VNNI"):
        check_quantization(config, torch.device("cpu"))
