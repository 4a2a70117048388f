"""The process in which grammars are tried before the engine compiles them.

Run as ``python -m trident_llm.text.grammar.worker``; it talks over its standard input and output in
frames: four bytes of length (big-endian), then that many bytes of JSON. The first frame in is the
vocabulary, answered ``{"ready": true}``; each further one is a grammar, answered by what trying it
found. It ends when its standard input does, so it never outlives the process that started it.

Each grammar is tried in a child of its own, which is killed when it takes too long: so a grammar
can neither hang, crash nor bloat this process, and no library is loaded twice.

Owns the limits of one compilation. It must not know caches or requests.

Invariant: after an answer nothing of the grammar is left but the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import warnings
from typing import Any

from trident_llm.text.grammar.backend import Backend, BackendError, Vocabulary
from trident_llm.text.grammar.spec import GrammarKind, GrammarSpec

MAX_FRAME_BYTES = 64 * 1024 * 1024
_PR_SET_PDEATHSIG = 1
_TRIED_TOKENS = 128  # of a random output, to see whether masks are made fast enough


def write_frame(fd: int, message: dict[str, Any]) -> None:
    """Write one frame to a blocking file descriptor."""
    view = memoryview(encode_frame(message))
    while view:
        view = view[os.write(fd, view) :]


def encode_frame(message: dict[str, Any]) -> bytes:
    """Return a message as a frame."""
    body = json.dumps(message).encode()
    assert len(body) <= MAX_FRAME_BYTES
    return struct.pack(">I", len(body)) + body


def frame_size(header: bytes) -> int:
    """Return how many bytes follow the four bytes of a frame's header.

    Raises:
        ValueError: more than a frame may have.
    """
    size: int = struct.unpack(">I", header)[0]
    if size > MAX_FRAME_BYTES:
        raise ValueError("a frame is too large")
    return size


def _read_frame(fd: int) -> dict[str, Any] | None:
    """Read one frame from a blocking file descriptor; None at its end."""
    header = _read(fd, 4)
    if header is None:
        return None
    body = _read(fd, frame_size(header))
    return None if body is None else json.loads(body)


def _read(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    # Whatever a library prints must not end up between frames.
    answers = os.dup(1)
    os.dup2(2, 1)
    # The child of a fork runs one thread, and nothing here has started another that it needs.
    warnings.simplefilter("ignore", DeprecationWarning)
    first = _read_frame(0)
    if first is None:
        return
    vocabulary = Vocabulary(
        tuple(token.encode("latin-1") for token in first["tokens"]),
        first["vocab_size"],
        tuple(first["stop_ids"]),
    )
    try:
        backend = Backend(vocabulary)
    except Exception as error:
        write_frame(answers, {"ready": False, "reason": f"{type(error).__name__}: {error}"[:500]})
        return
    write_frame(answers, {"ready": True})
    while (request := _read_frame(0)) is not None:
        answer = _try_in_child(backend, request)
        if answer is None:
            return
        write_frame(answers, answer)


def _try_in_child(backend: Backend, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a child found, or how it ended; None when standard input ended meanwhile."""
    reader, writer = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        _run_child(backend, request, writer, worker)
    os.close(writer)
    data = b""
    # Processor time is limited in the child; this bound holds where it gets little of it.
    deadline = time.monotonic() + request["real_seconds"]
    timed_out = False
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(0, select.POLLIN)
    try:
        while not timed_out:
            wait = deadline - time.monotonic()
            ready = dict(poll.poll(max(0, wait * 1000)))
            if 0 in ready:
                return None  # nothing is sent before an answer, so this is the end
            timed_out = not ready
            if reader in ready:
                part = os.read(reader, 1 << 16)
                if not part:
                    break
                data += part
    finally:
        os.close(reader)
        if timed_out or not data:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data and not timed_out:
        answer: dict[str, Any] = json.loads(data)
        return answer
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    slow = timed_out or ended_by == signal.SIGXCPU
    return {"ok": False, "kind": "slow" if slow else "crashed", "reason": ""}


def _run_child(backend: Backend, request: dict[str, Any], writer: int, worker: int) -> None:
    """Try the grammar, write what was found to ``writer``, and end the process."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it died before it could take us along
            os._exit(1)
        _limit(request["seconds"], request["memory_bytes"])
        answer = _try(backend, request)
    except MemoryError:
        answer = {"ok": False, "kind": "memory", "reason": ""}
    except BackendError as error:
        answer = {"ok": False, "kind": "refused", "reason": str(error)}
    except BaseException as error:
        answer = {"ok": False, "kind": "crashed", "reason": type(error).__name__}
    try:
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _limit(seconds: int, memory_bytes: int) -> None:
    """Bound this process's time and memory."""
    # A forked process has used no processor time yet.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(backend: Backend, request: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar and follow one random output of it for a while."""
    spec = GrammarSpec(GrammarKind(request["kind"]), request["text"], request["max_whitespace"])
    start = time.thread_time()
    compiled = backend.compile(spec)
    seconds = time.thread_time() - start
    token_seconds = _follow(backend, compiled)
    return {
        "ok": True,
        "num_bytes": compiled.memory_size_bytes,
        "seconds": seconds,
        "token_seconds": token_seconds,
    }


def _follow(backend: Backend, compiled: Any) -> float:
    """Return the processor seconds that a token takes, late in a random output of some tokens."""
    import numpy as np

    matcher = backend.matcher(compiled)
    vocab_size = backend.vocabulary.vocab_size
    bitmask = np.full((1, (vocab_size + 31) // 32), -1, dtype=np.int32)
    random = np.random.default_rng(0)
    spent = [0.0]
    for _ in range(_TRIED_TOKENS):
        start = time.thread_time()
        matcher.fill_next_token_bitmask(bitmask, 0)
        spent.append(time.thread_time() - start)
        bits = np.unpackbits(bitmask.view(np.uint8)[0], bitorder="little")[:vocab_size]
        bits[list(backend.vocabulary.stop_ids)] = 0
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            break
        token_id = int(random.choice(allowed))
        start = time.thread_time()
        accepted = matcher.accept_token(token_id)
        spent[-1] += time.thread_time() - start
        if not accepted or matcher.is_terminated():
            break
    # In an ambiguous grammar each token takes longer than the one before.
    late = spent[len(spent) // 2 :]
    return sum(late) / len(late)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
