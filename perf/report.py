"""What a benchmark leaves behind: one JSON object, and a table for those who watch.

Owns the form of a result and the description of where it was made. Invariant: the result is the last
line on standard output and nothing else is written there; all else goes to standard error.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numba", "numpy", "tritonclient", "grpcio", "nvidia-pytriton")
# Settings of the environment that change how fast a CPU computes.
_VARIABLES = ("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "MALLOC_", "NUMBA_", "LD_PRELOAD")

# The figures of a table, where the workload has them.
_COLUMNS = (
    "wall_s", "output_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s",
    "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p50_ms", "itl_p99_ms", "e2e_p50_ms",
    "goodput_requests_per_s",
)  # fmt: skip


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def spread(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Per figure the median, the least and the greatest of all runs."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: spread_of([run[name] for run in runs if name in run]) for name in names}


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, to four digits."""
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
    }


def table(name: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """The main figures of one workload, a line each: median [least..greatest]."""
    lines = [f"{name}:"]
    for column in _COLUMNS:
        if column in figures:
            cell = figures[column]
            lines.append(f"  {column:<24} {cell['median']:>9g}  [{cell['min']:g}..{cell['max']:g}]")
    return "\n".join(lines)


def result(
    benchmark: str, settings: Mapping[str, Any], content: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole result: where, when and how it was made, and ``content``."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "command": _without_folders(
            shlex.join([Path(sys.executable).name, "-m", _module(), *sys.argv[1:]])
        ),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "versions": {"python": platform.python_version()} | versions(),
        "settings": {
            # Of a model the name, not where this machine keeps it.
            name: Path(value).name if name == "model" else value
            for name, value in settings.items()
        },
        **content,
    }


def _without_folders(command: str) -> str:
    """A command with files and programs by their names, not by where this machine keeps them.

    >>> _without_folders("env A=/x/y.so:/x/z.so /opt/v/bin/python -m m --model /data/some --set a/b")
    'env A=y.so:z.so python -m m --model some --set a/b'
    """
    return re.sub(r"(?<![\w./-])/(?:[^\s:'\"/]+/)+", "", command)


def publish(content: Mapping[str, Any], output: Path | None) -> None:
    """Prints a result as one line, and writes it to the file ``output``, if given, for readers."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(_readable(content) + "\n")
        say(f"written to {output}")
    print(json.dumps(content), flush=True)


def machine() -> dict[str, Any]:
    """Processor, usable cores, memory, and how busy the machine was."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line]
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit of the code that runs, with a "+" if files differ from it; else "unknown"."""
    root = Path(__file__).parent.parent
    try:
        revision = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Versions of the packages that matter, of those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _module() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _readable(value: Any, indent: str = "") -> str:
    """JSON with a line per figure: objects that hold no others stay on one line."""
    if not isinstance(value, Mapping) or not any(isinstance(v, Mapping) for v in value.values()):
        return json.dumps(value)
    inner = indent + "  "
    items = (f"{inner}{json.dumps(key)}: {_readable(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + "\n" + indent + "}"
