"""Loads a model onto a device and executes steps there.

Here every ``None`` of the configuration becomes a number: device, type, pool size, limits. The
executor is what the engine talks to; with several devices it would talk to one runner each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trident_kernels import can_quantize
from trident_llm.core.config import EngineConfig, SchedulerConfig
from trident_llm.core.embedding import EmbeddingConfig
from trident_llm.core.errors import ConfigError
from trident_llm.core.machine import available_cores, available_memory, format_bytes
from trident_llm.core.messages import SchedulerOutput, StepResult
from trident_llm.model.config import ModelConfig, weight_bytes
from trident_llm.model.decode_graphs import CudaRecorder, graph_sizes
from trident_llm.model.decoder import Decoder
from trident_llm.model.kv_cache import KVCache, block_bytes
from trident_llm.model.runner import LaunchedStep, ModelRunner, RunnerConfig
from trident_llm.model.sampling.mask import TokenMask

DEFAULT_CPU_POOL = 2**30
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Limits:
    """The effective settings, all resolved."""

    device: torch.device
    dtype: torch.dtype
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    launch_depth: int
    quantization: str | None

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"device={self.device} dtype={str(self.dtype).removeprefix('torch.')} "
            f"quantization={self.quantization} "
            f"max_model_len={self.max_model_len} max_num_seqs={self.max_num_seqs} "
            f"max_num_batched_tokens={self.max_num_batched_tokens} "
            f"block_size={self.block_size} num_blocks={self.num_blocks} "
            f"max_waiting={self.max_waiting} launch_depth={self.launch_depth}"
        )


def resolve_device(config: EngineConfig | EmbeddingConfig) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError("device is cuda, but torch sees no CUDA device; use device cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_dtype(config: EngineConfig | EmbeddingConfig, device: torch.device) -> torch.dtype:
    """The type to compute in: bfloat16 where the device has it, float32 elsewhere."""
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
        if device.type == "cpu" and dtype is torch.float16:
            raise ConfigError("dtype float16 is not supported on CPU; use bfloat16 or float32")
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def resolve_limits(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Limits:
    """Sizes of pool and batch for a model that is loaded already.

    ``max_model_len`` becomes the one limit that everybody uses: what is asked for, or what the model
    supports, lowered to what the pool holds.

    Raises:
        ConfigError: the pool does not fit the memory, or holds less than one block, or settings
            contradict each other.
    """
    on_cpu = device.type == "cpu"
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    budget = config.max_num_batched_tokens or max(512 if on_cpu else 8192, max_num_seqs)
    if budget < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({max_num_seqs}), so "
            "that every running sequence gets a token in each step"
        )
    supported = model.max_supported_len
    if config.max_model_len is not None and config.max_model_len > supported:
        raise ConfigError(
            f"max_model_len must be at most {supported}, the longest context this model supports"
        )
    wanted_len = config.max_model_len or supported
    per_block = block_bytes(
        model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, dtype
    )
    num_blocks = config.num_blocks or _pool_blocks(config, device, per_block, wanted_len)
    _check_pool_memory(device, num_blocks, per_block)
    pool_tokens = (num_blocks - 1) * config.block_size
    if pool_tokens < 2:
        raise ConfigError(
            f"the KV pool holds {pool_tokens} tokens; raise num_blocks or kv_cache_memory_bytes "
            f"(one block of {config.block_size} tokens takes {format_bytes(per_block)})"
        )
    return Limits(
        device=device,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=min(wanted_len, pool_tokens),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_waiting=config.max_waiting or 4 * max_num_seqs,
        launch_depth=config.launch_depth if config.launch_depth is not None else int(not on_cpu),
        quantization=config.quantization,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def _pool_blocks(
    config: EngineConfig, device: torch.device, per_block: int, max_model_len: int
) -> int:
    """Blocks of a pool whose size was not given in blocks."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // per_block
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = total * config.gpu_memory_utilization - (total - free)
        # Room for the activations of the largest step, which are small beside the weights.
        return max(0, int(budget - 0.03 * total)) // per_block
    # On CPU memory is shared with everything else: enough for one full-length sequence and at
    # least the default, but never more than half of what is free.
    one_sequence = (-(-max_model_len // config.block_size) + 1) * per_block
    return min(max(DEFAULT_CPU_POOL, one_sequence), available_memory() // 2) // per_block


def _check_pool_memory(device: torch.device, num_blocks: int, per_block: int) -> None:
    wanted, free = num_blocks * per_block, _free_bytes(device)
    if wanted > free:
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks needs {format_bytes(wanted)}, but only "
            f"{format_bytes(free)} of memory are free; lower num_blocks or kv_cache_memory_bytes"
        )


def _make_kv_cache(model: ModelConfig, limits: Limits) -> KVCache:
    try:
        return KVCache(
            num_layers=model.num_layers,
            num_blocks=limits.num_blocks,
            num_kv_heads=model.num_kv_heads,
            block_size=limits.block_size,
            head_dim=model.head_dim,
            dtype=limits.dtype,
            device=limits.device,
        )
    except (MemoryError, OSError, RuntimeError) as error:  # whoever refuses has its own
        raise ConfigError(
            f"the memory for the KV pool of {limits.num_blocks} blocks was refused "
            f"({type(error).__name__}); lower num_blocks, kv_cache_memory_bytes or "
            "gpu_memory_utilization, or free some memory"
        ) from None


def check_weights_fit(needed: int, device: torch.device) -> None:
    """Raises :class:`ConfigError` if the device has less than ``needed`` bytes for the weights."""
    free = _free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"the model's weights need {format_bytes(needed)}, but only {format_bytes(free)} of "
            "memory are free; free some memory or serve a smaller model"
        )


def check_quantization(config: EngineConfig, device: torch.device) -> None:
    """Raises :class:`ConfigError` if this machine cannot quantize as ``config`` asks."""
    if config.quantization is None:
        return
    if device.type != "cpu" or not can_quantize():
        raise ConfigError(
            "quantization int8 needs a CPU with AVX-512 VNNI (and numba) as the device; leave it out"
        )


def set_threads(config: EngineConfig | EmbeddingConfig) -> int:
    """Sizes torch's thread pool once; the thread that calls this is the one that computes."""
    threads = config.num_threads or available_cores()
    torch.set_num_threads(threads)
    return threads


def model_identity(folder: Path, kind: str) -> tuple[str, ...]:
    """What the KV of a token depends on besides the tokens; part of every block hash."""
    config_file = folder / "config.json"
    content = config_file.read_bytes() if config_file.is_file() else str(folder).encode()
    return (hashlib.sha256(content).hexdigest(), kind)


class Executor:
    """One model on one device: launches steps and collects their results, in order."""

    def __init__(
        self, runner: ModelRunner, limits: Limits, model: ModelConfig, identity: tuple[str, ...]
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.model = model
        self.identity = identity
        self.eos_token_ids = runner.config.eos_token_ids

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_token_id: int | None = None,
        phase: Callable[[str], None] = lambda name: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Executor:
        """Loads the model of ``config`` and makes its KV pool.

        Args:
            vocab_size: the tokenizer's size, added tokens included; ids beyond are never sampled.
            eos_token_id: the tokenizer's own end, which joins those that the model's files name.
            phase: told the name of each phase as it begins ("weights", "kv pool", "kernels").
            progress: told (tensors done, tensors in all) while weights load.

        Raises:
            ConfigError: a setting, the model folder or the memory does not allow it.
        """
        set_threads(config)
        folder = Path(config.model)
        model = ModelConfig.from_folder(folder)
        device = resolve_device(config)
        dtype = resolve_dtype(config, device)
        check_quantization(config, device)
        phase("weights")
        check_weights_fit(weight_bytes(model, str(dtype).removeprefix("torch.")), device)
        max_len = min(config.max_model_len or model.max_supported_len, model.max_supported_len)
        decoder = Decoder.load(
            folder,
            model,
            dtype=dtype,
            device=device,
            max_len=max_len,
            int8=config.quantization == "int8",
            progress=progress,
        )
        phase("kv pool")
        limits = resolve_limits(config, model, device, dtype)
        kv_cache = _make_kv_cache(model, limits)
        vocab_size = min(vocab_size, model.vocab_size)
        ends = {*model.eos_token_ids, *([] if eos_token_id is None else [eos_token_id])}
        runner = ModelRunner(
            decoder,
            kv_cache,
            RunnerConfig(
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
                vocab_size=vocab_size,
                eos_token_ids=frozenset(end for end in ends if end < vocab_size),
            ),
        )
        if device.type == "cuda":
            phase("kernels")
            runner.warm_up(limits.max_num_batched_tokens)
            if config.cuda_graphs:
                runner.record_graphs(graph_sizes(limits.max_num_seqs), CudaRecorder())
        kind = f"{dtype} {config.quantization}"
        return cls(runner, limits, model, model_identity(folder, kind))

    def scheduler_config(self, config: EngineConfig) -> SchedulerConfig:
        """The scheduler's limits for this executor."""
        limits = self.limits
        # With length-dependent rotary embeddings the KV of equal tokens differs between prompts.
        cacheable = not self.runner.decoder.needs_rope_lens
        return SchedulerConfig(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_waiting=limits.max_waiting,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            scheduling_policy=config.scheduling_policy,
            enable_prefix_caching=config.enable_prefix_caching and cacheable,
            eos_token_ids=self.eos_token_ids,
            cache_identity=self.identity,
        )

    def launch(self, output: SchedulerOutput, mask: TokenMask | None = None) -> LaunchedStep:
        """Starts a step."""
        return self.runner.launch(output, mask)

    def collect(self, launched: LaunchedStep) -> StepResult:
        """Waits for the oldest launched step."""
        return self.runner.collect(launched)
