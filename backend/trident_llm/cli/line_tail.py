"""Reads the lines that another process appends to a file: the server's log, the model's progress."""

from __future__ import annotations

from pathlib import Path


class LineTail:
    """Complete lines of ``path`` as they arrive, from ``offset`` bytes on; the file may come later."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._partial = b""

    def read_new(self) -> list[str]:
        """Lines completed since the last call, without their ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
