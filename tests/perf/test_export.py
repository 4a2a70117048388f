from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import export
from perf.metrics import summarize

RECORDED = Path(__file__).with_name("export.json")


def test_requests_responses_and_tokens() -> None:
    (experiment,) = export.read(RECORDED)
    assert (experiment.mode, experiment.level) == ("concurrency", 2.0)
    assert experiment.texts == ("abc", "de")
    first, second = experiment.traces
    assert first.ttft == pytest.approx(0.100)
    assert first.gaps == pytest.approx([0.020, 0.040])
    assert [tokens for _, tokens in first.responses] == [1, 2, 1]
    assert first.prompt_tokens == 7
    # Nobody asked the second request's counts: what the export says there means nothing.
    assert [tokens for _, tokens in second.responses] == [1, 1]
    assert second.prompt_tokens == 0
    assert second.arrival == pytest.approx(0.010000001, abs=1e-12)
    assert summarize(experiment.traces)["wall_s"] == pytest.approx(0.220000001)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"experiments": [{"experiment": {"mode": "concurrency", "value": 1}, "requests": []}]}',
        '{"experiments": [{"requests": [{"timestamp": 1}]}]}',
    ],
)
def test_what_is_no_export_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(export.ExportError):
        export.read(path)


def test_an_output_without_a_time_is_refused(tmp_path: Path) -> None:
    content = json.loads(RECORDED.read_text())
    content["experiments"][0]["requests"][1]["response_timestamps"].pop()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    with pytest.raises(export.ExportError, match="1 response times for 2 outputs"):
        export.read(path)
