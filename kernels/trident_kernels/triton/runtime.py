"""How Triton kernels are declared and started.

Every kernel starts through `launch`, so that a recorder can stand in for the device: that is how
kernels are compiled ahead of time and how a step is traced where there is no GPU. Nothing here waits
for the device: grids come from shapes and from the host's upper bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

Grid = tuple[int, ...]
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Device:
    """What launch parameters depend on."""

    arch: int  # compute capability, 90 for 9.0
    num_sms: int


@dataclass(frozen=True)
class Launch:
    """One start of a kernel, as recorded."""

    kernel: Any
    grid: Grid
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


Recorder = Callable[[Launch], None]
_recording: tuple[Recorder, Device] | None = None
# The interpreter computes what the smallest supported GPU would, with few programs worth splitting.
_INTERPRETED = Device(arch=80, num_sms=8)


def jit(*, varying: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Declares a kernel. ``varying`` arguments change from step to step: they get no variants."""

    def declare(function: Callable[..., None]) -> Any:
        return triton.jit(function, do_not_specialize=list(varying))

    return declare


def device_function(function: Callable[..., Any]) -> Any:
    """Declares a function that kernels call."""
    return triton.jit(function)


def launch(
    kernel: Any, grid: Grid, *args: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any
) -> None:
    """Starts ``kernel`` on ``grid`` programs; with an empty grid there is nothing to start."""
    if 0 in grid:
        return
    if _recording is not None:
        _recording[0](Launch(kernel, grid, args, constants, num_warps, num_stages))
        return
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    kernel[grid](*args, **constants, **options)


@contextmanager
def recording(recorder: Recorder, device: Device) -> Iterator[None]:
    """Within it kernels are recorded as if for ``device`` and not started."""
    global _recording
    before, _recording = _recording, (recorder, device)
    try:
        yield
    finally:
        _recording = before


@functools.cache
def _properties(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)


def device_of(tensor: torch.Tensor) -> Device:
    """The device that a tensor's kernels run on."""
    if _recording is not None:
        return _recording[1]
    if tensor.is_cuda:
        return _properties(tensor.get_device())
    return _INTERPRETED


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
