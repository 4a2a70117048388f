"""What this machine lets us use: memory and cores, cgroup limits counted, and its Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def available_memory() -> int:
    """Bytes that can be allocated now without swapping, within the cgroup's limit."""
    available = None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available is None:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def available_cores() -> int:
    """Cores that this process may run on, at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota.isdigit() and int(period) > 0:
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def find_interpreter() -> Path | None:
    """The Python that runs this process, also where it is embedded in another program.

    There, as in Triton's stub, ``sys.executable`` may be empty or name that program.
    """
    candidates = [Path(sys.executable)] if sys.executable else []
    candidates += [Path(prefix) / "bin" / "python3" for prefix in (sys.prefix, sys.base_prefix)]
    for path in candidates:
        if path.name.startswith("python") and os.access(path, os.X_OK):
            return path
    found = shutil.which("python3")
    return None if found is None else Path(found)


def format_bytes(count: int) -> str:
    """``count`` as people read it: "1.5 GiB", "256 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            value = count / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{count} B"
