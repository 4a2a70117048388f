from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from perf import analyzer, export, tools
from perf.analyzer import Shape

RECORDED = Path(__file__).with_name("export.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3.0]), ("1:3", [1.0, 2.0, 3.0]), ("1:16:5", [1.0, 6.0, 11.0, 16.0]), ("2:7:4", [2, 6])],
)
def test_levels(text: str, expected: list[float]) -> None:
    assert analyzer.levels(text) == expected


@pytest.mark.parametrize("text", ["", "x", "0", "3:1", "1:2:0", "1:2:-1"])
def test_levels_that_do_not_rise_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        analyzer.levels(text)


def test_every_request_has_a_prompt_of_its_own() -> None:
    shape = Shape(requests=50, words=20, output_tokens=7)
    data = analyzer.input_data(shape, "a", 50)["data"]
    others = analyzer.input_data(shape, "b", 50)["data"]
    assert len({entry["text_input"][0] for entry in [*data, *others]}) == 100
    assert data == analyzer.input_data(shape, "a", 50)["data"]
    sampling = json.loads(data[0]["sampling_parameters"][0])
    assert sampling == {"max_tokens": 7, "ignore_eos": True, "temperature": 0}


def test_an_answer_that_is_not_streamed_is_an_error(tmp_path: Path) -> None:
    (experiment,) = export.read(RECORDED)
    with pytest.raises(RuntimeError, match="2 tokens came, not 4"):
        analyzer.check(experiment, 4)
    content = json.loads(RECORDED.read_text())
    request = content["experiments"][0]["requests"][0]
    request["response_timestamps"] = request["response_timestamps"][:1]
    request["response_outputs"] = [
        {"text_output": "x", "num_output_tokens": 4, "num_input_tokens": 1}
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match="not streamed"):
        analyzer.check(export.read(path)[0], 4)


def test_missing_libraries_are_read_from_the_dynamic_linker() -> None:
    trace = "\tlibz.so.1 => /lib/libz.so.1 (0x1)\n\tlibb64.so.0d => not found\n"
    assert tools.missing_libraries(trace) == ["libb64.so.0d"]
    with pytest.raises(tools.ToolUnavailableError, match=r"GLIBC_2\.38"):
        tools.missing_libraries("x: /lib/libc.so.6: version `GLIBC_2.38' not found (required by x)")
