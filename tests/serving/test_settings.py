"""What a version folder and a config.pbtxt say, and the device that an instance is given."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.model.test_gguf_tokenizer import CHAT_TEMPLATE, byte_level, write
from trident_llm.core.config import DEFAULT_MODEL, EngineConfig
from trident_llm.core.errors import ConfigError
from trident_llm.model import default_model as fetching
from trident_llm.model.default_model import DefaultModelError
from trident_llm.serving.progress import ENVIRONMENT_VARIABLE, Progress
from trident_llm.serving.settings import choose_device, load_texts, read_settings, reports_metrics


def write_settings(folder: Path, settings: Any) -> Path:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "model.json").write_text(text)
    return folder


def test_a_model_json_as_users_of_vllm_write_it(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    config, warnings = read_settings(
        write_settings(
            tmp_path,
            {
                "model": "weights", "gpu_memory_utilization": 0.1, "enforce_eager": True,
                "disable_log_requests": "true", "max_num_seqs": "8",
            },
        ),
        Progress(),
    )  # fmt: skip
    assert config.model == str(tmp_path / "weights")
    assert (config.gpu_memory_utilization, config.max_num_seqs) == (0.1, 8)
    assert ["enforce_eager" in warnings[0], "disable_log_requests" in warnings[1]] == [True, True]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (None, "model.json is missing"),
        ("{", "is not valid JSON"),
        ("[]", 'must be a JSON object with "model"'),
        ({}, 'must be a JSON object with "model"'),
        ({"model": 5}, 'must be a JSON object with "model"'),
        ({"model": ""}, "does not exist"),
        ({"model": "facebook/opt-125m"}, "opt-125m does not exist; give the folder"),
        ({"model": ".", "invalid_argument": 1}, "unknown setting invalid_argument"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_sentence(tmp_path: Path, settings: Any, sentence: str) -> None:
    if settings is not None:
        write_settings(tmp_path, settings)
    with pytest.raises(ConfigError, match=sentence):
        read_settings(tmp_path, Progress())


SHIPPED = Path(__file__).parents[2] / "model_repository/llm/1"


def test_the_shipped_settings_name_the_default_model_which_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path]] = []

    def fetch(name: str, home: Path, progress: fetching.Progress) -> Path:
        asked.append((name, home))
        progress("download", 0, 1)
        progress("convert", 1, 2)
        return home / "fetched"

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    monkeypatch.setenv("TRIDENT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "progress"))
    config, warnings = read_settings(SHIPPED, Progress())
    assert (config.model, warnings) == (str(tmp_path / "home" / "fetched"), [])
    assert asked == [(DEFAULT_MODEL, tmp_path / "home")]
    events = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert events == [
        {"event": "begin", "phase": "model"},
        {"event": "progress", "phase": "model", "done": 1, "total": 2},
    ]
    # A folder of that name beside the file is what the operator means.
    write_settings(tmp_path, {"model": DEFAULT_MODEL})
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert read_settings(tmp_path, Progress())[0].model == str(tmp_path / DEFAULT_MODEL)
    assert len(asked) == 1


def test_a_default_model_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: str, home: Path, progress: fetching.Progress) -> Path:
        raise DefaultModelError("no network")

    monkeypatch.setattr(fetching, "fetch_model", fetch)
    monkeypatch.setenv("TRIDENT_HOME", "/home/of/trident")
    sentence = (
        f'no network: set "model" in {SHIPPED}/model.json to the folder of a model, or fetch the '
        "default one into /home/of/trident beforehand, with python3 -m "
        "trident_llm.model.default_model"
    )
    with pytest.raises(ConfigError) as caught:
        read_settings(SHIPPED, Progress())
    assert str(caught.value) == sentence


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_gguf_alone_brings_tokenizer_and_chat_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_folder: bool
) -> None:
    folder, temporary = tmp_path / "model", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    original = byte_level()
    file = write(folder, original, "gpt2", "gpt-2")
    model = folder if as_folder else file.path
    tokenizer, template = load_texts(EngineConfig(model=str(model)))
    text = "hello world 123"
    assert tokenizer.encode(text, add_special_tokens=False) == original.encode(text).ids
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    assert CHAT_TEMPLATE
    assert list(temporary.iterdir()) == []
    assert [path.name for path in folder.iterdir()] == [file.path.name]


def test_a_tokenizer_setting_wins_over_the_gguf(tmp_path: Path, tiny_model: Path) -> None:
    file = write(tmp_path, byte_level(), "gpt2", "gpt-2")
    tokenizer, _ = load_texts(EngineConfig(model=str(file.path), tokenizer=str(tiny_model)))
    assert tokenizer.vocab_size == load_texts(EngineConfig(model=str(tiny_model)))[0].vocab_size


@pytest.mark.parametrize(
    ("parameters", "reports"),
    [
        ({}, True),
        ({"REPORT_CUSTOM_METRICS": {"string_value": "true"}}, True),
        ({"REPORT_CUSTOM_METRICS": {"string_value": "False"}}, False),
    ],
)
def test_metrics_are_on_unless_switched_off(parameters: Any, reports: bool) -> None:
    assert reports_metrics({"parameters": parameters}) is reports
    assert reports_metrics({}) is True


@pytest.mark.parametrize(
    ("kind", "device", "visible", "chosen"),
    [
        ("GPU", "1", None, "1"),
        ("GPU", "0", "4,6", "4"),
        ("GPU", "1", "4, GPU-6f3e", "GPU-6f3e"),
        ("CPU", "0", "0,1", ""),
        ("MODEL", "0", "0,1", "0,1"),
        ("MODEL", "0", None, None),
    ],
)
def test_an_instance_sees_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    device: str,
    visible: str | None,
    chosen: str | None,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        # So that what the call sets is taken back at the end of the test.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        os.environ.pop("CUDA_VISIBLE_DEVICES")
    choose_device({"model_instance_kind": kind, "model_instance_device_id": device})
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == chosen


def test_a_device_that_is_not_visible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="asks for GPU 2, but CUDA_VISIBLE_DEVICES names only 1"):
        choose_device({"model_instance_kind": "GPU", "model_instance_device_id": "2"})
