"""Compiling kernels: the decorators, where compiled code is kept, how many threads run.

Owns Numba's settings for this package. Compiled code goes to the first writable folder of
NUMBA_CACHE_DIR, the package's own __pycache__ and the user's cache folder, in a subfolder named
after the content of the kernel sources: Numba itself only looks at the file of the outermost
function, so an edited helper would otherwise leave stale code. No writable folder means compiling
anew in each process, never an error.

Invariant: every kernel takes only int64 and float64 arguments (addresses, sizes, strides), so that
one compilation serves every model.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import torch

settings: Any = numba.config
if settings.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: the CPU kernels exist only as compiled code")


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _writable(folder: Path) -> bool:
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def _choose_cache_folder() -> Path | None:
    roots = [Path(__file__).parent / "__pycache__"]
    with suppress(RuntimeError):  # there may be no home folder
        roots.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    if settings.CACHE_DIR:
        roots.insert(0, Path(settings.CACHE_DIR))
    name = f"trident_kernels-{_fingerprint()}"
    return next((root / name for root in roots if _writable(root / name)), None)


CACHE_FOLDER = _choose_cache_folder()
# torch brings OpenMP threads anyway; read when Numba starts its first threads.
settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


@contextmanager
def _cache_setting() -> Iterator[None]:
    # Numba reads this setting when a function is decorated; other users of Numba keep theirs.
    before = settings.CACHE_DIR
    if CACHE_FOLDER is not None:
        settings.CACHE_DIR = str(CACHE_FOLDER)
    try:
        yield
    finally:
        settings.CACHE_DIR = before


def device(function: Callable[..., Any]) -> Any:
    """A function that kernels call; compiled into each of them."""
    return numba.njit(nogil=True, error_model="numpy")(function)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel function compiled with and without threads, each at its first call.

    The function's first two arguments are `mode` (element type) and `threads` (chunks of its
    prange); parallel_from is the amount of work from which threads pay.
    """

    serial: Any
    parallel: Any
    parallel_from: int

    def __call__(self, work: int, mode: int, *args: float) -> None:
        """Run on one thread or, if there is enough work, on all."""
        if work < self.parallel_from or (count := threads()) == 1:
            compiled, count = self.serial, 1
        else:
            compiled = self.parallel
        try:
            compiled(mode, count, *args)
        except OSError:
            # Only storing freshly compiled code can raise this (a full disk), before the first
            # run; the code itself is loaded.
            compiled(mode, count, *args)

    def compile(self) -> None:
        """Compile all versions, or load them from the cache folder."""
        annotations = self.serial.py_func.__annotations__
        signature = tuple(
            numba.float64 if kind == "float" else numba.int64
            for name, kind in annotations.items()
            if name != "return"
        )
        for compiled in (self.serial, self.parallel):
            try:
                compiled.compile(signature)
            except OSError:
                continue  # as above: compiled, but not stored


def kernel(
    parallel_from: int, *, with_serial: bool = True
) -> Callable[[Callable[..., None]], Kernel]:
    """Make a Kernel of a function over int (int64) and float (float64) arguments.

    Without a serial version of its own, which takes time to compile, the parallel one runs on one
    thread too.
    """
    launch_cost = 1 if _has_openmp() else 50  # OpenMP starts threads in 3 us, the other in 200 us

    def wrap(function: Callable[..., None]) -> Kernel:
        # Numba's cache tells functions apart by name, not by options: without its own name the
        # parallel version would be taken for the serial one.
        code, scope = function.__code__, function.__globals__
        copy = FunctionType(code, scope, f"{function.__name__}_parallel")
        copy.__qualname__ = copy.__name__
        copy.__annotations__ = function.__annotations__
        parallel = _compiled(copy, True)
        serial = _compiled(function, False) if with_serial else parallel
        return Kernel(serial, parallel, parallel_from * launch_cost)

    return wrap


def _compiled(function: Callable[..., None], parallel: bool) -> Any:
    with _cache_setting():
        return numba.njit(
            nogil=True, error_model="numpy", parallel=parallel, cache=CACHE_FOLDER is not None
        )(function)


def _has_openmp() -> bool:
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    return True


def threads() -> int:
    """Threads of a parallel kernel: as many as torch uses, at most Numba's pool."""
    wanted = torch.get_num_threads()
    count: int = min(wanted, settings.NUMBA_NUM_THREADS)
    if numba.get_num_threads() != count:
        numba.set_num_threads(count)
    if torch.get_num_threads() != wanted:
        # Numba has just started its pool, and told the OpenMP that it shares with torch its own number.
        torch.set_num_threads(wanted)
    return count
