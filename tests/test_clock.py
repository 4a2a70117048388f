"""Whoever sets the machine's clock changes no wait and no measured time.

All arithmetic is done with ``time.monotonic()``. The places that read the clock on the wall are listed
here with what for; none of them subtracts two readings or compares one with a limit.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("backend", "kernels", "client", "perf", "model_repository")

WALL_CLOCK = {
    "time": {
        "time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime",
        "clock_gettime_ns",
    },
    "datetime": {"now", "utcnow", "today", "datetime"},
}  # fmt: skip
ALLOWED = {
    ("backend/trident_llm/serving/protocol.py", "time_ns"): "once, to tell moments since 1970",
    ("backend/trident_llm/text/sandbox.py", "now"): "a template asks for today's date",
    ("client/trident_client/openai/gateway.py", "time"): "the field `created` of answers",
    ("perf/report.py", "now"): "the date of a result",
}


def readings(path: Path) -> set[str]:
    """The functions of the wall clock that a file mentions."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}  # what the file calls the two modules, and the classes in them
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in WALL_CLOCK:
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module in WALL_CLOCK:
            for alias in node.names:
                if node.module == "datetime":
                    modules[alias.asname or alias.name] = "datetime"
                elif alias.name in WALL_CLOCK[node.module]:
                    found.add(alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            module = modules.get(base.id) if isinstance(base, ast.Name) else None
            if module is not None and node.attr in WALL_CLOCK[module]:
                found.add(node.attr)
    return found - {"datetime"}


def test_time_is_measured_by_the_monotonic_clock() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for name in readings(path)
    }
    assert found == ALLOWED.keys()


def test_every_way_to_read_the_wall_clock_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    for text, name in (
        ("import time\ntime.time()", "time"),
        ("import time as t\nf = t.time_ns", "time_ns"),
        ("from time import time", "time"),
        ("import datetime\ndatetime.datetime.now()", "now"),
        ("from datetime import datetime as d\nd.utcnow()", "utcnow"),
        ("from datetime import date\ndate.today()", "today"),
        ("import time\ndef f():\n    return time.clock_gettime(0)", "clock_gettime"),
    ):
        file.write_text(text)
        assert readings(file) == {name}, text
    file.write_text("import time\ntime.monotonic()\ntime.sleep(1)\ntime.perf_counter()")
    assert readings(file) == set()
