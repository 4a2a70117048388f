"""Whether lm-eval finds the same through the gateway as with Hugging Face's own model, in float32.

    python -m perf.lm_eval_check --venv /tmp/lm-eval

Two small tasks are made of this project's own texts: which ending belongs to a beginning
(log-likelihoods, through ``echo`` and ``logprobs``), and how a beginning goes on (``generate_until``).
lm-eval runs in an environment of its own, made at ``--venv`` if there is none. The status is 1 if a
log-likelihood differs by more than the tolerance, or a text at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf import options, report
from perf.server import Gateway, Server

_PACKAGES = ("torch==2.13.0", "lm-eval[api,hf]==0.4.13")
_ROOT = Path(__file__).parent.parent
_SOURCES = ("README.md", "client/README.md", "perf/LOG.md")
_NUM_ENDINGS = 3
_TASKS: dict[str, dict[str, Any]] = {
    "trident_endings": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{beginning}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "trident_goes_on": {
        "output_type": "generate_until",
        "doc_to_text": "{{beginning}}",
        "doc_to_target": "{{endings[answer]}}",
        "generation_kwargs": {"until": ["\n\n", "<|im_end|>"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def make_documents(count: int) -> list[dict[str, Any]]:
    """Paragraphs of this project's texts, cut in the middle, each with the endings of others."""
    paragraphs = [
        " ".join(paragraph.split())
        for source in _SOURCES
        for paragraph in re.split(r"\n\s*\n", (_ROOT / source).read_text())
        if len(paragraph.split()) >= 24 and not paragraph.lstrip().startswith(("#", "|", "`", "<"))
    ][:count]
    halves = [_halves(paragraph) for paragraph in paragraphs]
    endings = [ending for _, ending in halves]
    documents = []
    for index, (beginning, _) in enumerate(halves):
        chosen = [endings[(index + step) % len(endings)] for step in range(_NUM_ENDINGS)]
        answer = index % _NUM_ENDINGS  # not always the first
        documents.append(
            {
                "beginning": beginning,
                "endings": chosen[-answer:] + chosen[:-answer],
                "answer": answer,
            }
        )
    return documents


def _halves(paragraph: str) -> tuple[str, str]:
    words = paragraph.split()[:60]
    middle = len(words) // 2
    return " ".join(words[:middle]), " " + " ".join(words[middle:])


def write_tasks(folder: Path, documents: Sequence[Mapping[str, Any]]) -> None:
    """The tasks as lm-eval reads them; JSON is YAML too."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in _TASKS.items():
        whole = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(whole))


def prepare(venv: Path) -> Path:
    """lm-eval's program in ``venv``, which is made if it is not there."""
    program = venv / "bin" / "lm_eval"
    if not program.exists():
        report.say(f"installing {', '.join(_PACKAGES)} into {venv}")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *_PACKAGES]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return program


def evaluate(
    program: Path, tasks: Path, output: Path, model: str, arguments: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """What a model answered, by task: log-likelihoods or texts, in the order of the documents."""
    listed = ",".join(f"{name}={value}" for name, value in arguments.items())
    report.say(f"lm-eval with {model}")
    subprocess.run(
        [
            str(program), "--model", model, "--model_args", listed, "--tasks", ",".join(_TASKS),
            "--include_path", str(tasks), "--batch_size", "1", "--device", "cpu", "--log_samples",
            "--output_path", str(output),
        ],
        check=True, stdout=sys.stderr, env=_environment(output),
    )  # fmt: skip
    return {name: _answers(output, name) for name in _TASKS}


def _environment(output: Path) -> dict[str, str]:
    """Nothing is fetched: the model, its tokenizer and the documents are files."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(output / "hf")}
    return {**os.environ, **offline, "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}


def _answers(output: Path, task: str) -> list[Any]:
    (path,) = output.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda s: s["doc_id"])
    answers: list[Any] = []
    for sample in samples:
        for response in sample["resps"]:
            first = response[0]
            answers.append(first if isinstance(first, str) else float(first[0]))
    return answers


def compare(ours: Mapping[str, list[Any]], theirs: Mapping[str, list[Any]]) -> dict[str, Any]:
    """How far the answers are from each other."""
    pairs = list(zip(ours["trident_endings"], theirs["trident_endings"], strict=True))
    texts = list(zip(ours["trident_goes_on"], theirs["trident_goes_on"], strict=True))
    return {
        "loglikelihoods": {
            "count": len(pairs),
            "largest_difference": max(abs(one - other) for one, other in pairs),
            "mean": sum(one for one, _ in pairs) / len(pairs),
        },
        "texts": {"count": len(texts), "equal": sum(one == other for one, other in texts)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.lm_eval_check",
        description="Compare lm-eval through the gateway with lm-eval on Hugging Face's model.",
    )
    parser.add_argument(
        "--venv", type=Path, help="lm-eval's environment (default: a temporary one)"
    )
    parser.add_argument("--documents", type=int, default=12, metavar="N", help="default: 12")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X",
        help="of a log-likelihood, a sum over tokens (default: 0.001)",
    )  # fmt: skip
    options.add_model_options(parser)
    options.add_output_option(parser)
    parser.set_defaults(dtype="float32")
    given = parser.parse_args(arguments)
    settings = options.model_settings(given)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = prepare(given.venv or folder / "venv")
        tasks = folder / "tasks"
        tasks.mkdir()
        write_tasks(tasks, make_documents(given.documents))
        with Server(settings) as server, (gateway := Gateway(server.url)):
            ours = evaluate(
                program, tasks, folder / "ours", "local-completions",
                {
                    "model": "llm", "base_url": f"{gateway.url}/v1/completions",
                    "tokenizer": settings["model"], "tokenizer_backend": "huggingface",
                    "num_concurrent": 4, "max_length": 2048,
                },
            )  # fmt: skip
        theirs = evaluate(
            program, tasks, folder / "theirs", "hf",
            {"pretrained": settings["model"], "dtype": settings["dtype"]},
        )  # fmt: skip
    found = compare(ours, theirs)
    report.publish(report.result("lm_eval_check", settings, found), given.output)
    close = found["loglikelihoods"]["largest_difference"] <= given.tolerance
    return 0 if close and found["texts"]["equal"] == found["texts"]["count"] else 1


if __name__ == "__main__":
    sys.exit(main())
