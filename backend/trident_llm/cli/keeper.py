"""Starts the server as its child, and leaves nothing behind whatever happens to the command.

Run as a program of its own, between ``trident serve`` and tritonserver: it lives on when the command
is killed, and then brings the server to an end and cleans up. Standard library only, and nothing of
ours, since it is started by its path.

It is told to stop through its standard input, a pipe from the command: the end of the pipe (also when
the command died) asks the server to finish its requests and leave; a byte on it ends the server at
once. Its first line of output is the server's process id; its exit status is the server's, 128 + N for
signal N. Invariant: when it exits, every process of the server's group and every shared memory region
under its prefix are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GROUP_END_SECONDS = 2.0  # a stub without its server ends by itself within 0.3 s


def main(arguments: list[str]) -> int:
    """``arguments``: seconds from SIGTERM to SIGKILL, shm prefix, run directory, the command."""
    patience, shm_prefix, run_directory, *command = arguments
    parent = os.getppid()
    woken = _wake_up_on_signals()
    # Orphaned stubs become our children, so that we can wait for them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = _start(command)
    sys.stdout.write(f"{server}\n")
    sys.stdout.flush()
    status = _watch(server, woken, float(patience))
    _end_group(server)
    remove_shared_memory(shm_prefix)
    if os.getppid() != parent:
        shutil.rmtree(run_directory, ignore_errors=True)
    return status


def remove_shared_memory(prefix: str) -> None:
    """Removes shared memory regions whose names begin with ``prefix``."""
    for path in glob.glob(f"/dev/shm/{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _wake_up_on_signals() -> int:
    """A file descriptor that becomes readable, and gives the number, when a signal arrives."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Not ignored, which a started program would inherit.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    return reader


def _start(command: list[str]) -> int:
    """Starts the server as the leader of a process group of its own; returns its process id."""
    keeper = os.getpid()
    server = os.fork()
    if server:
        with contextlib.suppress(OSError):  # the child does it too: whoever comes first
            os.setpgid(server, server)
        return server
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() == keeper:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # the pipe must end with the command
            os.dup2(2, 1)  # all output is log
            os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _watch(server: int, woken: int, patience: float) -> int:
    """Waits until the server has ended, and asks it to end when told so. Returns its status."""
    deadline: float | None = None
    inputs = [0, woken]
    while (status := _reap(server)) is None:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(inputs, [], [], wait)
        signals = os.read(woken, 64) if woken in ready else b""
        told = os.read(0, 1) if 0 in ready else None
        if told == b"":
            inputs.remove(0)
        stop = told == b"" or any(number != signal.SIGCHLD for number in signals)
        if stop and deadline is None:
            os.kill(server, signal.SIGTERM)
            deadline = time.monotonic() + patience
        if told or (deadline is not None and time.monotonic() >= deadline):
            os.killpg(server, signal.SIGKILL)
            deadline = time.monotonic() + patience
    return status


def _reap(server: int) -> int | None:
    """Waits for children that have ended; the server's exit status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while True:
            child, raw = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            if child == server:
                code = os.waitstatus_to_exitcode(raw)
                status = code if code >= 0 else 128 - code
    return status


def _end_group(group: int) -> None:
    """Gives what is left of the server's group a moment to end by itself, then ends it."""
    killed_after = time.monotonic() + _GROUP_END_SECONDS
    while True:
        _reap(group)
        try:
            os.killpg(group, signal.SIGKILL if time.monotonic() > killed_after else 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
