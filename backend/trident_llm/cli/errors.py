"""The one error a user of the command line sees: a sentence, and no traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot do what was asked; the text says what to change."""
