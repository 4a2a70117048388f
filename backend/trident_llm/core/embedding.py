"""What a request for an embedding asks for, and the settings of an engine that embeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trident_llm.core.config import DEVICE_HELP, check_ranges, parse_settings, setting
from trident_llm.core.errors import invalid

PoolingMethod = Literal["mean", "cls", "last"]
POOLING_PARAMS = ("dimensions", "normalize", "truncate_prompt_tokens")


@dataclass(frozen=True)
class EmbeddingConfig:
    """Every setting of an engine that embeds; names are those of :class:`EngineConfig`."""

    model: str = setting("", "folder of the model: config.json, tokenizer.json, *.safetensors")
    tokenizer: str | None = setting(None, "folder of the tokenizer, if it is not the model's")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", DEVICE_HELP)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of weights and activations; auto is that of the checkpoint"
    )
    pooling: Literal["mean", "cls", "last"] | None = setting(
        None, "what of a text's hidden states is its embedding, where the folder does not say"
    )
    max_model_len: int | None = setting(
        None, "longest text in tokens; default: what the model says"
    )
    max_num_seqs: int | None = setting(None, "most texts computed in one step")
    max_num_batched_tokens: int | None = setting(
        None, "most tokens computed in one step; a text that is longer is computed alone"
    )
    max_waiting: int | None = setting(None, "requests that may wait before new ones are refused")
    admission: Literal["reject", "block"] = setting(
        "reject",
        "when max_waiting is reached: answer UNAVAILABLE, or leave requests in Triton's own queue",
    )
    num_threads: int | None = setting(None, "CPU threads of the model; default: the cores at hand")
    drain_seconds: float = setting(
        10.0, "how long requests in flight may finish when the server leaves"
    )
    watchdog_seconds: float = setting(
        120.0, "how long the engine may make no progress before it counts as stuck"
    )
    log_requests: bool = setting(
        True, "a line of JSON in the log at the end of each request, with nothing of its text"
    )

    def __post_init__(self) -> None:
        check_ranges(self)


def parse_embedding_config(settings: Mapping[str, Any]) -> tuple[EmbeddingConfig, list[str]]:
    """As :func:`trident_llm.core.config.parse_engine_config`, for a model that embeds."""
    return parse_settings(EmbeddingConfig, settings)


@dataclass(frozen=True)
class PoolingParams:
    """How a text becomes a vector."""

    dimensions: int | None = None  # leading ones of the model's, which are normalised again
    normalize: bool | None = None  # None: as the model's own configuration says
    truncate_prompt_tokens: int | None = (
        None  # keeps a text's first tokens; -1: what the model takes
    )


@dataclass(slots=True, eq=False)
class EmbeddingRequest:
    """One text to embed. Its length and ``params`` are checked."""

    request_id: str
    prompt_token_ids: list[int]
    params: PoolingParams


def parse_pooling_params(values: Mapping[str, Any], field: str) -> PoolingParams:
    """Reads :class:`PoolingParams`; ``field`` is where they stood.

    Numbers may be strings or lists of one, as clients of vllm_backend send them.

    Raises:
        RequestError: INVALID_ARG naming the key at fault.
    """
    if any(name not in POOLING_PARAMS for name in values):
        raise invalid(field, f"holds an unknown key; the keys are: {', '.join(POOLING_PARAMS)}")
    dimensions = _integer(values, "dimensions", field)
    if dimensions is not None and dimensions < 1:
        raise invalid(f"{field}.dimensions", "must be at least 1")
    truncate = _integer(values, "truncate_prompt_tokens", field)
    if truncate is not None and truncate != -1 and truncate < 1:
        raise invalid(
            f"{field}.truncate_prompt_tokens", "must be at least 1, or -1 for what the model takes"
        )
    normalize = values.get("normalize")
    if isinstance(normalize, str) and normalize.lower() in ("true", "false"):
        normalize = normalize.lower() == "true"
    if normalize is not None and not isinstance(normalize, bool):
        raise invalid(f"{field}.normalize", "must be true or false")
    return PoolingParams(dimensions, normalize, truncate)


def _integer(values: Mapping[str, Any], name: str, field: str) -> int | None:
    value = values.get(name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        value = int(value)
    if value is None or type(value) is int:
        return value
    raise invalid(f"{field}.{name}", "must be a whole number")


def check_dimensions(params: PoolingParams, num_dimensions: int, field: str) -> None:
    """Raises :class:`RequestError` if the model's vectors are shorter than what is asked for."""
    if params.dimensions is not None and params.dimensions > num_dimensions:
        raise invalid(
            f"{field}.dimensions",
            f"must be at most {num_dimensions}, the length of the model's vectors",
        )


def check_text_length(num_tokens: int, max_model_len: int, field: str) -> None:
    """Raises :class:`RequestError` if a text out of the input ``field`` is too long to embed."""
    if num_tokens > max_model_len:
        raise invalid(
            field,
            f"has {num_tokens} tokens; it must fit max_model_len, which is {max_model_len}: shorten "
            "it, or let it be cut with truncate_prompt_tokens",
        )
