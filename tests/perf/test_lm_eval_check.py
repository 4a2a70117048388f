"""The tasks for lm-eval: each document's own ending is the answer, and answers are compared truly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import gateway, lm_eval_check


def test_the_answer_is_the_paragraphs_own_ending(tmp_path: Path) -> None:
    documents = lm_eval_check.make_documents(9)
    assert len(documents) == 9
    assert {document["answer"] for document in documents} == {0, 1, 2}
    sources = " ".join(
        " ".join((lm_eval_check._ROOT / name).read_text().split())
        for name in lm_eval_check._SOURCES
    )
    for document in documents:
        assert document["beginning"] + document["endings"][document["answer"]] in sources
        others = [e for i, e in enumerate(document["endings"]) if i != document["answer"]]
        assert not any(document["beginning"] + other in sources for other in others)
    lm_eval_check.write_tasks(tmp_path, documents)
    lines = (tmp_path / "documents.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == documents
    task = json.loads((tmp_path / "trident_endings.yaml").read_text())
    assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "documents.jsonl")


def test_answers_are_read_in_the_order_of_the_documents(tmp_path: Path) -> None:
    samples = [
        {"doc_id": 1, "resps": [[["-3.5", "False"]], [["-1.0", "True"]]]},
        {"doc_id": 0, "resps": [[["-2.5", "False"]], [["-4.0", "True"]]]},
    ]
    path = tmp_path / "model" / "samples_endings_2026.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert lm_eval_check._answers(tmp_path, "endings") == [-2.5, -4.0, -3.5, -1.0]


def test_differences_are_found() -> None:
    ours = {"trident_endings": [-1.0, -2.0], "trident_goes_on": ["a", "b"]}
    theirs = {"trident_endings": [-1.0, -2.25], "trident_goes_on": ["a", "c"]}
    found = lm_eval_check.compare(ours, theirs)
    assert found["loglikelihoods"]["largest_difference"] == 0.25
    assert found["texts"] == {"count": 2, "equal": 1}
    with pytest.raises(ValueError, match="shorter"):
        lm_eval_check.compare(ours, {**theirs, "trident_endings": [-1.0]})


def test_the_gateways_ratio_is_of_the_same_round() -> None:
    rounds = [
        {"grpc": {"speed": 100.0}, "gateway": {"speed": 90.0}},
        {"grpc": {"speed": 50.0}, "gateway": {"speed": 45.0}},  # the machine got slower
    ]
    assert gateway.ratios(rounds, "speed") == {"median": 0.9, "min": 0.9, "max": 0.9}
