"""What the command prints: phases with their seconds, lines, warnings, a streamed answer.

It knows the terminal and nothing of what is reported. Invariants: without a terminal every phase is
one plain line; a reader that went away (closed terminal, closed pipe) never stops the command.
"""

from __future__ import annotations

import contextlib
import time
from typing import TextIO

_NAME_WIDTH = 12


class Console:
    """Writes to ``out``, warnings and errors to ``err``. ``live``: ``out`` can rewrite its line."""

    def __init__(self, out: TextIO, err: TextIO, live: bool) -> None:
        self._out = out
        self._err = err
        self._live = live
        self.name_width = _NAME_WIDTH  # of the longest phase's name that is expected
        self._phase: str | None = None
        self._began = 0.0
        self._count = ""
        self._line_is_live = False

    def line(self, text: str = "") -> None:
        self._clear_live_line()
        self._write(self._out, f"{text}\n")

    def warn(self, text: str) -> None:
        self._clear_live_line()
        self._write(self._err, f"warning: {text}\n")

    def error(self, text: str) -> None:
        self._clear_live_line()
        self._write(self._err, f"error: {text}\n")

    def log(self, text: str) -> None:
        """A line of the server's log."""
        self._clear_live_line()
        self._write(self._err, f"{printable(text)}\n")

    def stream(self, text: str) -> None:
        """Part of a line, shown at once; control characters are replaced."""
        self._clear_live_line()
        self._write(self._out, printable(text))

    def begin_phase(self, name: str) -> None:
        """Begins a phase; one that still runs ends now."""
        self.end_phase()
        self._phase, self._began, self._count = name, time.monotonic(), ""
        self.tick()

    def count(self, done: int, total: int) -> None:
        """How much of the running phase is done."""
        self._count = f"  {done}/{total}"
        self.tick()

    def tick(self) -> None:
        """Shows the running phase's time so far, where the line can be rewritten."""
        if self._live and self._phase is not None:
            self._clear_live_line()
            seconds = time.monotonic() - self._began
            self._write(self._out, f"{self._phase_line(self._phase, seconds)}{self._count}")
            self._line_is_live = True

    def end_phase(self, seconds: float | None = None) -> None:
        """Ends the running phase, if any; ``seconds`` if someone measured them better."""
        if self._phase is None:
            return
        if seconds is None:
            seconds = time.monotonic() - self._began
        name, self._phase = self._phase, None
        self.line(self._phase_line(name, seconds))

    def show_phase(self, name: str) -> None:
        """Shows ``name`` as the running phase from now on, in the place of another that goes on."""
        self.drop_phase()
        self._phase, self._began, self._count = name, time.monotonic(), ""
        self.tick()

    def report_phase(self, name: str, seconds: float) -> None:
        """Tells of a phase that has ended, whether it is the one that is shown or not."""
        if self._phase == name:
            self._phase = None
        self.line(self._phase_line(name, seconds))

    def drop_phase(self) -> None:
        """Forgets the running phase: it did not come to its end."""
        self._phase = None
        self._clear_live_line()

    def _clear_live_line(self) -> None:
        if self._line_is_live:
            self._line_is_live = False
            self._write(self._out, "\r\x1b[K")

    def _phase_line(self, name: str, seconds: float) -> str:
        return f"  {name:<{self.name_width}} {seconds:6.1f} s"

    def _write(self, stream: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def printable(text: str) -> str:
    """``text`` without what could steer a terminal; a model may write anything."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
