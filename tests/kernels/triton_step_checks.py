"""Steps of the runner, sampling included, in which the host never waits for the device.

Run by test_triton.py in a process of its own, with every tensor sent through the Triton kernels. The
device is torch's "meta", whose tensors have no values: whatever would read one (.item(), .tolist(),
bool(), a copy to the host, nonzero) cannot, on any line that runs. Copies to the device that would
wait are found by a dispatch mode. On a GPU torch's own sync debug mode watches the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.test_decode_graphs import rerunning
from trident_kernels.triton.runtime import Device, Launch, recording
from trident_llm.core.messages import BlockCopy, Fork, NewRow, ScheduledRow, SchedulerOutput
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.model.config import ModelConfig
from trident_llm.model.decode_graphs import CudaRecorder
from trident_llm.model.decoder import Decoder
from trident_llm.model.kv_cache import KVCache
from trident_llm.model.runner import ModelRunner, RunnerConfig
from trident_llm.model.sampling.mask import TokenMask

ON_GPU = torch.cuda.is_available()
DEVICE = Device(arch=90, num_sms=132)
VOCAB = 500
BLOCK_SIZE = 4


class NoWaiting(TorchDispatchMode):
    """Raises where the host would wait for the device."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            raise AssertionError(f"{name} waits for the device")
        if name == "_to_copy":
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            if source.type != target.type and not kwargs.get("non_blocking"):
                raise AssertionError(f"a copy from {source} to {target} that waits")
        if name in ("copy_", "index_put_", "index_put"):
            devices = {t.device.type for t in args if isinstance(t, torch.Tensor) and t.dim()}
            if len(devices) > 1 and not (len(args) > 2 and args[2] is True):
                raise AssertionError(f"{name} between devices waits")
        return func(*args, **kwargs)


class NoTensorFromLists(TorchFunctionMode):
    """torch.tensor(values, device=...) copies and waits, which no dispatch of "meta" shows."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise AssertionError("torch.tensor on the device waits for it")
        return func(*args, **kwargs)


@contextmanager
def watched(launches: list[Launch]) -> Iterator[None]:
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with recording(launches.append, DEVICE), NoWaiting(), NoTensorFromLists():
        yield


@pytest.fixture
def runner(tiny_model: Path) -> ModelRunner:
    device = torch.device("cuda", 0) if ON_GPU else torch.device("meta")
    config = ModelConfig.from_folder(tiny_model)
    decoder = Decoder.load(tiny_model, config, dtype=torch.float32, device=device, max_len=64)
    kv_cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=40,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=device,
    )
    sizes = RunnerConfig(8, 64, BLOCK_SIZE, VOCAB, frozenset({2}))
    return ModelRunner(decoder, kv_cache, sizes)


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.2, top_k=200, min_tokens=3, logprobs=2),
    SamplingParams(
        temperature=0.0,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias=((3, 1.0),),
        allowed_token_ids=tuple(range(100)),
        bad_words_token_ids=((4,), (5, 6)),
    ),
)


def steps(params: tuple[SamplingParams, ...]) -> list[SchedulerOutput]:
    """Prompts of seven tokens, one of them in chunks; then a decode step; then one that forks."""
    rows = range(len(params))
    new = [NewRow(row, [3, 4, 5, 6, 7, 8, 9], 7, 0, params[row], 11, 0) for row in rows]
    prompt = [ScheduledRow(row, 7, 0, [1 + 2 * row, 2 + 2 * row], True) for row in rows]
    chunk = ScheduledRow(0, 3, 0, [1, 2], False)
    rest = ScheduledRow(0, 4, 0, [], True)
    decode = [ScheduledRow(row, 1, 0, [], True) for row in rows]
    grown = [ScheduledRow(row, 1, 2, [20 + row], True) for row in rows]
    copied = [*decode[:-1], ScheduledRow(rows[-1], 1, 1, [30], True)]
    return [
        SchedulerOutput(1, new_rows=new, scheduled_rows=[chunk, *prompt[1:]]),
        SchedulerOutput(2, scheduled_rows=[rest, *decode[1:]]),
        SchedulerOutput(3, scheduled_rows=grown),
        SchedulerOutput(4, scheduled_rows=decode, forks=[Fork(0, 6, 1)]),
        SchedulerOutput(5, scheduled_rows=copied, block_copies=[BlockCopy(2 * len(params), 30)]),
    ]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("params", [PARAMS[:1], PARAMS[:3], PARAMS], ids=["greedy", "draws", "all"])
def test_a_step_never_waits(
    runner: ModelRunner, params: tuple[SamplingParams, ...], graphs: bool
) -> None:
    launches: list[Launch] = []
    outputs = steps(params)
    if graphs:
        with recording(lambda launch: None, DEVICE) if not ON_GPU else nullcontext():
            runner.record_graphs([2, 8], CudaRecorder() if ON_GPU else rerunning([]))
    if ON_GPU:  # compiling the kernels may wait
        for output in outputs:
            runner.launch(output)
    with watched(launches):
        for output in outputs:
            runner.launch(output)
    if not ON_GPU:
        names = [each.kernel.fn.__name__ for each in launches]
        layers = runner.decoder.config.num_layers
        for name in ("_rope_and_write_kv", "_paged_attention"):
            assert names.count(name) == layers * len(outputs)
        assert {"_rms_norm", "_silu_and_mul"} <= set(names)


def test_a_grammar_mask_does_not_wait(runner: ModelRunner) -> None:
    outputs = steps(PARAMS[:3])
    bits = np.full((2, -(-VOCAB // 32)), -1, np.int32)
    mask = TokenMask(np.asarray([0, 2]), bits)
    runner_launch: Callable[..., Any] = runner.launch
    with watched([]):
        runner_launch(outputs[0])
        runner_launch(outputs[1])
        runner_launch(outputs[2], mask)


@pytest.mark.skipif(ON_GPU, reason="proves the watcher that stands in for a GPU's")
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1, 2], device=x.device),
        lambda x: torch.zeros(3).to(x.device),
        lambda x: x.copy_(torch.zeros(3)),
    ],
)
def test_the_watcher_sees(waits: Callable[[torch.Tensor], Any]) -> None:
    x = torch.zeros(3, device="meta")
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), watched([]):
        waits(x)
