"""Settings of the engine: one frozen object, parsed in one place.

Names are vLLM's where the meaning is the same, so that a ``model.json`` written for it can be read.
Settings of vLLM that mean nothing here are warned about; unknown ones are refused. ``None`` means
"chosen at load, by the device and the model"; what was chosen is told in one line at load.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trident_llm.core.errors import ConfigError

# A "model" in model.json that is fetched: one that generates and one that embeds; no other is.
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_EMBEDDING_MODEL = "all-minilm-l6-v2"


DEVICE_HELP = "where the model runs"

Config = TypeVar("Config")


def setting(default: Any, help: str) -> Any:
    """A field of a configuration, with the sentence that explains it to users."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineConfig:
    """Every setting of the engine. Each field is also an option of ``trident serve``."""

    model: str = setting(
        "", "folder of the model: config.json, tokenizer.json, *.safetensors, or GGUF"
    )
    tokenizer: str | None = setting(None, "folder of the tokenizer, if it is not the model's")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", DEVICE_HELP)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "type of weights, activations and KV cache; auto is bfloat16 where the device computes in it",
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus output, in tokens; default: what the model and the pool allow"
    )
    block_size: int = setting(16, "tokens of one KV block")
    num_blocks: int | None = setting(None, "KV blocks; overrides the sizes in bytes")
    kv_cache_memory_bytes: int | None = setting(None, "size of the KV pool in bytes")
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use in all")
    max_num_seqs: int | None = setting(None, "most sequences running at once")
    max_num_batched_tokens: int | None = setting(None, "most tokens computed in one step")
    long_prefill_token_threshold: int | None = setting(
        None,
        "most prompt tokens of one sequence in a step; default: half of max_num_batched_tokens "
        "while others want a share, else all",
    )
    max_waiting: int | None = setting(
        None,
        "requests that may wait for a place before others are refused; default 4 x max_num_seqs",
    )
    admission: Literal["reject", "block"] = setting(
        "reject",
        "when max_waiting is reached: answer UNAVAILABLE, or leave requests in Triton's own queue",
    )
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "order of waiting requests; with priority a lower value goes first"
    )
    enable_prefix_caching: bool = setting(True, "share the KV of equal prefixes between requests")
    launch_depth: int | None = setting(
        None, "steps launched before the oldest one is collected (0 to 2); default 0 on CPU"
    )
    seed: int | None = setting(None, "makes the seeds of requests that bring none repeatable")
    generation_config: Literal["auto", "vllm"] = setting(
        "auto",
        "auto: sampling defaults from the model's generation_config.json; vllm: neutral ones",
    )
    max_logprobs: int = setting(20, "most log-probabilities a request may ask per token")
    num_threads: int | None = setting(None, "CPU threads of the model; default: the cores at hand")
    drain_seconds: float = setting(
        10.0, "how long requests in flight may finish when the server leaves"
    )
    cuda_graphs: bool = setting(
        False, "on a GPU: replay decode steps from CUDA graphs, which were recorded at load"
    )
    watchdog_seconds: float = setting(
        120.0, "how long the engine may make no progress before it counts as stuck"
    )
    log_requests: bool = setting(
        True, "a line of JSON in the log at the end of each request, with nothing of its text"
    )
    tensor_parallel_size: int = setting(1, "devices that share one model; only 1 is supported")
    quantization: Literal["int8"] | None = setting(
        None, "int8: linear layers in 8 bits, on CPUs with AVX-512 VNNI; default: as dtype says"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError("num_blocks must be at least 2: block 0 is reserved for padding")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError("gpu_memory_utilization must be above 0 and at most 1")
        if self.launch_depth is not None and not 0 <= self.launch_depth <= 2:
            raise ConfigError("launch_depth must be 0, 1 or 2")
        if not 0 <= self.max_logprobs <= 100:
            raise ConfigError("max_logprobs must be between 0 and 100")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                "tensor_parallel_size must be 1: one device per instance is supported"
            )


_AT_LEAST_ONE = (
    "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_waiting",
    "long_prefill_token_threshold", "kv_cache_memory_bytes", "num_threads",
)  # fmt: skip
_SECONDS = {"drain_seconds": (0.0, 600.0), "watchdog_seconds": (0.1, 86400.0)}


def check_ranges(config: Any) -> None:
    """Raises :class:`ConfigError` for a value that no kind of engine can work with."""
    for name in _AT_LEAST_ONE:
        value = getattr(config, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    for name, (least, most) in _SECONDS.items():
        if not least <= getattr(config, name) <= most:
            raise ConfigError(f"{name} must be between {least:g} and {most:g}")


# Settings of vLLM's AsyncEngineArgs that have no meaning here: accepted with a warning.
INAPPLICABLE_SETTINGS = frozenset({
    "enforce_eager", "swap_space", "cpu_offload_gb", "disable_log_requests", "disable_log_stats",
    "enable_log_requests", "trust_remote_code", "tokenizer_mode", "load_format", "download_dir",
    "revision", "tokenizer_revision", "max_seq_len_to_capture", "enable_chunked_prefill",
    "distributed_executor_backend", "worker_use_ray", "compilation_config", "served_model_name",
    "use_v2_block_manager", "disable_custom_all_reduce", "skip_tokenizer_init", "kv_cache_dtype",
    "pipeline_parallel_size", "max_parallel_loading_workers", "guided_decoding_backend",
    "structured_outputs_config", "max_context_len_to_capture", "limit_mm_per_prompt",
    "num_scheduler_steps", "preemption_mode", "async_scheduling",
})  # fmt: skip

# Other names under which vLLM knows a setting.
SETTING_ALIASES = {
    "num_gpu_blocks_override": "num_blocks",
}


def parse_engine_config(settings: Mapping[str, Any]) -> tuple[EngineConfig, list[str]]:
    """The configuration that ``settings`` (the content of ``model.json``) describes, and warnings.

    Values may be strings ("16", "true"), as command lines and older files have them.

    Raises:
        ConfigError: an unknown setting, or a value of the wrong type or range, by name.
    """
    return parse_settings(EngineConfig, settings)


def parse_settings(
    kind: Callable[..., Config], settings: Mapping[str, Any]
) -> tuple[Config, list[str]]:
    """As :func:`parse_engine_config`, for the configuration ``kind``."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for key, value in settings.items():
        name = SETTING_ALIASES.get(key, key)
        if name in hints:
            values[name] = _convert(name, value, hints[name])
        elif key in INAPPLICABLE_SETTINGS:
            warnings.append(f"setting {key} does not apply to this engine and is ignored")
        else:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"unknown setting {key}; the settings are: {known}")
    return kind(**values), warnings


def _convert(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the type that the field ``name`` is annotated with."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(option for option in options if option is not type(None))
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ConfigError(f"{name} must be one of {', '.join(get_args(kind))}")
    if kind is str and isinstance(value, str):
        return value
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
    elif kind in (int, float) and isinstance(value, (int, float, str)) and value is not True:
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            number = None
        if number is not None and not isinstance(value, bool) and number == float(value):
            return number
    wanted = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
    raise ConfigError(f"{name} must be {wanted[kind]}")


def setting_help() -> dict[str, str]:
    """What each setting means, by name, in the order of the fields."""
    return {entry.name: entry.metadata["help"] for entry in fields(EngineConfig)}


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits that the scheduler works with, all resolved."""

    num_blocks: int  # including the reserved block 0
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    long_prefill_token_threshold: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    cache_identity: tuple[str, ...] = ()  # what else the KV depends on: model, dtype

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool can hold: block 0 holds none."""
        return (self.num_blocks - 1) * self.block_size
