"""The one error a user of the command line sees: a sentence, and no traceback."""

from __future__ import annotations

import errno


class CommandError(Exception):
    """The command cannot do what was asked; the text says what to change."""


def describe(error: OSError) -> str:
    """What the machine refused, as a sentence."""
    reason = error.strerror or str(error)
    where = f"{error.filename2 or error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return f"{where}{reason}; make room there, or set TMPDIR to a folder that can be written"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{where}{reason}; raise the limit (ulimit -n)"
    return where + reason
