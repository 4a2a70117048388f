from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from trident_llm.cli.console import Console
from trident_llm.cli.line_tail import LineTail


class Terminal(io.StringIO):
    """Shows what a terminal would: "\\r\\x1b[K" clears the line."""

    def shown(self) -> list[str]:
        return [re.sub(r".*\r\x1b\[K", "", line) for line in self.getvalue().split("\n")]


def test_without_a_terminal_a_finished_phase_is_one_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, live=False)
    console.begin_phase("weights")
    console.count(1, 2)
    console.tick()
    assert out.getvalue() == ""
    console.end_phase(1.25)
    console.begin_phase("warm-up")
    console.begin_phase("kv pool")  # ends the one before
    console.drop_phase()
    console.end_phase()
    assert re.fullmatch(r"  weights         1\.2 s\n  warm-up         \d\.\d s\n", out.getvalue())
    assert err.getvalue() == ""


def test_on_a_terminal_the_line_is_rewritten() -> None:
    out = Terminal()
    console = Console(out, io.StringIO(), live=True)
    console.begin_phase("weights")
    console.count(10, 120)
    assert re.fullmatch(r"  weights  +\d\.\d s  10/120", out.shown()[-1])
    console.line("between")
    console.tick()
    console.end_phase(2.0)
    assert out.shown() == ["between", "  weights         2.0 s", ""]


def test_warnings_and_errors_go_elsewhere() -> None:
    out, err = Terminal(), io.StringIO()
    console = Console(out, err, live=True)
    console.begin_phase("server")
    console.warn("little memory")
    console.error("no port")
    assert err.getvalue() == "warning: little memory\nerror: no port\n"
    assert out.shown() == [""]


def test_a_model_cannot_steer_the_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, live=False)
    console.stream("a\x1b[2Jb\n\té\r")
    console.log("\x07")
    assert out.getvalue() == "a�[2Jb\n\té�"
    assert err.getvalue() == "�\n"


def test_a_reader_that_went_away_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as broken:
        console = Console(broken, broken, live=True)
        console.begin_phase("server")
        console.line("lost")
        console.error("lost")
        with pytest.raises(BrokenPipeError):
            broken.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


def test_only_complete_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.read_new() == []
    path.write_bytes(b"one\r\ntw")
    assert tail.read_new() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert tail.read_new() == ["two", "�"]
    assert tail.read_new() == []
    assert LineTail(path, offset=5).read_new() == ["two", "�"]


def test_phases_of_two_models_that_load_at_once() -> None:
    out = Terminal()
    console = Console(out, io.StringIO(), live=True)
    console.name_width = 14
    console.begin_phase("server")
    console.begin_phase("llm weights")
    console.show_phase("embed weights")
    console.count(3, 4)
    assert re.fullmatch(r"  embed weights  +\d\.\d s  3/4", out.shown()[-1])
    console.report_phase("llm weights", 2.0)  # not the one that is shown
    console.tick()
    console.report_phase("embed weights", 3.0)
    console.end_phase()
    assert out.shown()[1:] == ["  llm weights       2.0 s", "  embed weights     3.0 s", ""]
