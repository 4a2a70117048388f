"""The parameters that all generating endpoints share, and the reading of a body into its model.

Owns OpenAI's and vLLM's names for them; their ranges are the model server's to check. Invariant: a
field that is not listed is refused by name, and one that cannot be honoured is accepted only at a
value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from trident_client.openai.errors import ApiError, bad_request

__all__ = ["MAX_CHOICES", "Body", "Generation", "StreamOptions", "parse_body"]

MAX_CHOICES = 1024  # of one request: n times its prompts

# Known to OpenAI or vLLM, and not supported; with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "moderation": (),
    "prompt_cache_retention": (),
    "prompt": (),
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "include": ([],),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "chat_template": (),
    "documents": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "guided_whitespace_pattern": (),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
}
# Labels of the caller's own, which ask nothing of us.
_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id")


class Body(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream tells besides its output."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class Generation(Body):
    """Sampling, as both endpoints have it. What is not None goes to the server under its own name."""

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | str | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(text, str) for text in texts):
            raise ValueError("must be a string or a list of strings")
        return value

    @field_validator("response_format")
    @classmethod
    def _plain_text_is_no_format(cls, value: Any) -> Any:
        return None if value == {"type": "text"} else value

    def given(self) -> dict[str, Any]:
        """The sampling parameters that the caller named."""
        return {
            name: value
            for name in Generation.model_fields
            if name != "model" and (value := getattr(self, name)) is not None
        }


_Body = TypeVar("_Body", bound=Body)


def parse_body(model: type[_Body], value: Any) -> _Body:
    """The request in a body. Raises `ApiError` naming the parameter that is wrong."""
    if not isinstance(value, dict):
        raise bad_request(None, "The body must be a JSON object")
    given = {name: item for name, item in value.items() if name not in _LABELS}
    for name, neutral in _NEUTRAL.items():
        if name in given and name not in model.model_fields:
            if given[name] is not None and given[name] not in neutral:
                raise bad_request(
                    name, "is not supported here; leave it out", "unsupported_parameter"
                )
            del given[name]
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in ("str", "dict[str,any]", "bool"):  # which of several types, no name
            break
        else:
            param += f".{part}" if param else part
    if first["type"] == "extra_forbidden":
        shown = param if len(param) <= 64 and param.isprintable() else "of that name"
        return ApiError(
            400, f"Unrecognized request argument: {shown}", param=shown, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return bad_request(param, "is required", "missing_required_parameter")
    reason = first["msg"].removeprefix("Value error, ")
    return bad_request(param, reason, "invalid_type" if "type" in first["type"] else None)
