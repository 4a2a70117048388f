"""What all-MiniLM-L6-v2 is: the vectors that sentence-transformers makes, without its package.

transformers' own BertModel in float32, one text at a time, the mean of its tokens, normalised; the
tokenizer's ids, cut after 256 as the folder says. Compared with sentence-transformers itself by
``python -m tests.model.embedding_oracle`` wherever that package is installed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

Vectors = npt.NDArray[np.float32]

_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "in",
    "to",
    "is",
    "was",
    "it",
    "for",
    "with",
    "he",
    "as",
    "his",
    "on",
    "be",
    "at",
    "by",
    "had",
    "not",
    "river",
    "stone",
    "market",
    "quantum",
    "photosynthesis",
    "Constantinople",
    "unbelievably",
    "gcc",
    "-O2",
    "foo_bar()",
    "3.14159",
    "https://x.org/a?b=1",
    "don't",
    "e-mail",
    "naïve",
    "Straße",
    "façade",
    "Zürich",
    "東京",
    "寿司",
    "привет",
    "мир",
    "안녕하세요",
    "🙂",
    "½",
    "é",
    "12,345.67",
    "...",
    "?!",
    "—",
    "\t",
    "\n",
    "<tag>",
    "[MASK]",
    "[SEP]",
    "##ing",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
]


def mixed_texts(count: int) -> list[str]:
    """``count`` texts of lengths from nothing to past the model's limit, most of them short."""
    chance = random.Random(7)
    lengths = [0, 1, 2, 250, 400]
    lengths += [int(2 ** chance.uniform(0, 5.5)) for _ in range(count - len(lengths))]
    texts = [" ".join(chance.choice(_WORDS) for _ in range(length)) for length in lengths]
    chance.shuffle(texts)
    return texts


class Oracle:
    """The model of a folder, as transformers loads it."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.BertModel.from_pretrained(
            folder, add_pooling_layer=False, dtype=torch.float32
        ).eval()
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def vector(self, text: str) -> Vectors:
        """[dimensions], of length 1."""
        ids = self._tokenizer(text, truncation=True, max_length=256, return_tensors="pt").input_ids
        with torch.no_grad():
            mean = self._model(ids).last_hidden_state[0].mean(0)
        vector: Vectors = torch.nn.functional.normalize(mean, dim=0).numpy()
        return vector


def worst_distance(some: Sequence[Vectors] | Vectors, others: Sequence[Vectors] | Vectors) -> float:
    """The greatest cosine distance between two lists of vectors, by pairs."""
    first, second = np.asarray(some, np.float64), np.asarray(others, np.float64)
    products = (first * second).sum(1)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return float((1 - products / norms).max())


def main() -> None:
    from sentence_transformers import SentenceTransformer

    folder, texts = Path(sys.argv[1]), mixed_texts(1000)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=32)
    oracle = Oracle(folder)
    ours = [oracle.vector(text) for text in texts]
    print(f"worst cosine distance of {len(texts)} texts: {worst_distance(ours, theirs):.2e}")


if __name__ == "__main__":
    main()
