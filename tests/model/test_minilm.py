"""The default model that embeds: 1,000 texts, one by one and in batches, against transformers.

The oracle stands for sentence-transformers, whose dependencies (scipy, scikit-learn) are too much to
install for one test; see tests/model/embedding_oracle.py for how the two are compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.model.embedding_oracle import Oracle, Vectors, mixed_texts, worst_distance
from trident_llm.core.embedding import (
    EmbeddingRequest,
    PoolingParams,
    parse_embedding_config,
)
from trident_llm.engine.embedding import EmbeddingEngine
from trident_llm.model.embedder import Embedder
from trident_llm.text.tokenizer import Tokenizer

BOUND = 1e-4


def make_engine(folder: Path, **settings: object) -> EmbeddingEngine:
    config, _ = parse_embedding_config({"model": str(folder), "device": "cpu", **settings})
    embedder = Embedder.load(config, vocab_size=Tokenizer.from_folder(folder).vocab_size)
    limits = embedder.limits
    return EmbeddingEngine(
        embedder,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def embed(engine: EmbeddingEngine, texts: list[list[int]]) -> list[Vectors]:
    """The vectors of texts that all wait together."""
    for index, ids in enumerate(texts):
        engine.add(EmbeddingRequest(str(index), ids, PoolingParams()))
    found: dict[str, Vectors] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.embedding is not None, output.error
            found[output.request_id] = output.embedding
    return [found[str(index)] for index in range(len(texts))]


def test_a_thousand_texts_of_mixed_lengths(default_embedding_model: Path) -> None:
    oracle = Oracle(default_embedding_model)
    texts = mixed_texts(1000)
    expected = [oracle.vector(text) for text in texts]
    tokenizer = Tokenizer.from_folder(default_embedding_model)
    ids = [tokenizer.encode_beginning(text, 256) for text in texts]
    lengths = {len(each) for each in ids}
    assert (min(lengths), max(lengths)) == (2, 256)
    assert len(lengths) > 100
    engine = make_engine(default_embedding_model)
    batched = embed(engine, ids)
    assert engine.num_moves / 2 < 300, "several texts share a step"
    alone = [embed(engine, [each])[0] for each in ids]
    assert worst_distance(batched, expected) < BOUND
    assert worst_distance(alone, expected) < BOUND
    for vectors in (batched, alone):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
