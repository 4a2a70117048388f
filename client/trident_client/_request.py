"""From what a caller asks to the inputs that are sent, given the inputs that the model has.

Owns the choice of inputs and their values; knows nothing about channels or streams. Invariant: no
input is sent that the model lacks; a call that cannot do without one fails and names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trident_client.errors import ServerError, UnsupportedFeature, invalid
from trident_client.results import Embeddings, ModelInfo, Usage
from trident_client.wire import Array, Response, Value

__all__ = [
    "BuildInputs",
    "Extras",
    "Prompt",
    "Prompts",
    "chat",
    "control",
    "control_reply",
    "embed",
    "embeddings_of",
    "generate",
    "split_prompts",
    "text_of",
    "token_ids_of",
]

Prompt = str | Sequence[int]
"""A text, or token ids."""

Prompts = list[str] | list[list[int]]
"""Several of them. Lists, because a text is itself a sequence of texts."""

_CHAT_FIELDS = frozenset(
    (
        "tools",
        "tool_choice",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    )
)

BuildInputs = Callable[[ModelInfo], Mapping[str, Value]]
"""The inputs of a request once the model is known; raises what is wrong with them."""


def split_prompts(prompt: Prompt | Prompts, field: str) -> tuple[list[Prompt], bool]:
    """The prompts in `prompt` and whether they are several; `field` is named if there are none.

    >>> split_prompts("Hi", "prompt"), split_prompts([1, 2], "prompt")
    ((['Hi'], False), ([[1, 2]], False))
    >>> split_prompts(["Hi", "Ho"], "prompt")
    (['Hi', 'Ho'], True)
    """
    if isinstance(prompt, str):
        return [prompt], False
    if len(prompt) == 0:
        raise invalid(field, "must be a text, a non-empty list of token ids, or a list of these")
    if any(isinstance(item, (str, Sequence, np.ndarray)) for item in prompt):
        return list(prompt), True  # type: ignore[arg-type]
    return [prompt], False  # type: ignore[list-item]


@dataclass(frozen=True)
class Extras:
    """What may go with any request besides its sampling parameters."""

    cache_salt: str | None = None
    return_perf_metrics: bool = False


def generate(
    prompt: Prompt,
    *,
    stream: bool,
    sampling: Mapping[str, object],
    extras: Extras = Extras(),
) -> BuildInputs:
    """A completion of one prompt."""

    def build(model: ModelInfo) -> dict[str, Value]:
        inputs: dict[str, Value] = {}
        if isinstance(prompt, str):
            _require(model, "text_input", "a prompt")
            inputs["text_input"] = prompt
        else:
            _require(model, "input_ids", "a prompt of token ids", of_trident=True)
            inputs["input_ids"] = prompt
        return inputs | _common(model, extras, stream=stream, sampling=sampling)

    return build


def chat(
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, object],
    *,
    stream: bool,
    extras: Extras = Extras(),
) -> BuildInputs:
    """The answer to a conversation; `options` are the template's and the sampling parameters."""
    template = {key: value for key, value in options.items() if key in _CHAT_FIELDS}
    sampling = {key: value for key, value in options.items() if key not in _CHAT_FIELDS}

    def build(model: ModelInfo) -> dict[str, Value]:
        _require(model, "chat", "chat()", of_trident=True)
        conversation = {"messages": [dict(message) for message in messages], **_given(template)}
        text = _json("chat", conversation)
        return {"chat": text} | _common(model, extras, stream=stream, sampling=sampling)

    return build


def _common(
    model: ModelInfo, extras: Extras, *, stream: bool, sampling: Mapping[str, object]
) -> dict[str, Value]:
    given = _given(sampling)
    inputs: dict[str, Value] = {}
    if given:
        _require(model, "sampling_parameters", f"{next(iter(given))}=")
    if stream:
        _require(model, "stream", "streaming")
    # Sent also when empty: without it a server reads request parameters instead, and ours are there.
    inputs["sampling_parameters"] = _json("sampling_parameters", given)
    inputs["stream"] = stream
    inputs["exclude_input_in_output"] = True
    inputs["return_finish_reason"] = True
    inputs["return_stop_reason"] = True
    inputs["return_num_input_tokens"] = True
    inputs["return_num_output_tokens"] = True
    inputs["return_num_cached_tokens"] = True
    inputs["return_token_ids"] = str(given.get("n", 1)) == "1"
    wants_logprobs = "logprobs" in given
    inputs["return_logprobs"] = wants_logprobs
    inputs["return_cumulative_logprob"] = wants_logprobs
    if "prompt_logprobs" in given:
        _require(model, "return_prompt_logprobs", "prompt_logprobs=", of_trident=True)
        inputs["return_prompt_logprobs"] = True
    if extras.cache_salt is not None:
        _require(model, "cache_salt", "cache_salt=", of_trident=True)
        inputs["cache_salt"] = extras.cache_salt
    if extras.return_perf_metrics:
        _require(model, "return_perf_metrics", "return_perf_metrics=", of_trident=True)
        inputs["return_perf_metrics"] = True
    return {
        name: value
        for name, value in inputs.items()
        if name in model.inputs and (value is not False or name == "stream")
    }


def control(operation: Mapping[str, object]) -> BuildInputs:
    """A `control` operation such as ``{"op": "stats"}``."""

    def build(model: ModelInfo) -> dict[str, Value]:
        _require(model, "control", f"{operation['op']}()", of_trident=True)
        return {"control": _json("control", operation)}

    return build


def control_reply(response: Response) -> dict[str, Any]:
    """The JSON object that a `control` operation answered with."""
    try:
        reply = json.loads("".join(response.texts("control_output")))
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise ServerError("the server answered a control operation without a JSON object")
    return reply


def token_ids_of(reply: Mapping[str, Any]) -> list[int]:
    """The ids in the reply to ``tokenize``."""
    ids = reply.get("token_ids")
    if not isinstance(ids, list):
        raise ServerError("the server answered tokenize without token_ids")
    return ids


def text_of(reply: Mapping[str, Any]) -> str:
    """The text in the reply to ``detokenize``."""
    text = reply.get("text")
    if not isinstance(text, str):
        raise ServerError("the server answered detokenize without text")
    return text


def embed(prompt: Prompt, pooling: Mapping[str, object]) -> BuildInputs:
    """The embedding of one prompt; of `pooling` what is not None is sent."""

    def build(model: ModelInfo) -> dict[str, Value]:
        _require(model, "embedding_request", "embed()")
        asked: dict[str, object] = {"input": prompt if isinstance(prompt, str) else list(prompt)}
        given = _given(pooling)
        if "dimensions" in given:
            given["dimensions"] = [given["dimensions"]]  # vllm_backend reads it out of a list
        if given:
            asked["pooling_params"] = given
        inputs: dict[str, Value] = {"embedding_request": _json("embedding_request", asked)}
        for name in ("return_embedding", "return_num_input_tokens"):
            if name in model.inputs:
                inputs[name] = True
        if "input_ids" not in model.inputs:
            # vllm_backend does not let `text_input` be absent, though it does not read it here.
            inputs["text_input"] = prompt if isinstance(prompt, str) else ""
        return inputs

    return build


def embeddings_of(responses: Sequence[Response]) -> Embeddings:
    """The answers to several prompts as one result, in their order."""
    counts = [sum(response.numbers("num_input_tokens")) for response in responses]
    told = all("num_input_tokens" in response.outputs for response in responses)
    vectors = [_embedding_of(response) for response in responses]
    if len({len(vector) for vector in vectors}) > 1:
        raise ServerError("the server answered with embeddings of different lengths")
    return Embeddings(np.stack(vectors), Usage(prompt_tokens=sum(counts) if told else None))


def _embedding_of(response: Response) -> Array:
    """The vector of a response, float32 [dimensions]; vllm_backend sends it as a JSON text."""
    value = response.outputs.get("embedding")
    try:
        if value is None:
            value = np.array(json.loads("".join(response.texts("text_output"))))
        vector = np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError):
        vector = np.empty(0, np.float32)
    if vector.ndim != 1 or vector.size == 0:
        raise ServerError("the server answered without an embedding")
    return vector


def _require(model: ModelInfo, name: str, what: str, *, of_trident: bool = False) -> None:
    """`of_trident` tells that only Trident's models have the input."""
    if name not in model.inputs:
        hint = ": it is not served by Trident" if of_trident else ""
        raise UnsupportedFeature(
            f"INVALID_ARG {name}: {what} needs this input, which the model {model.name!r} does not "
            f"have{hint}",
            code="INVALID_ARG",
            field=name,
        )


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in options.items() if value is not None}


def _json(field: str, value: Mapping[str, object]) -> str:
    for key, item in value.items():
        try:
            json.dumps(item, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise invalid(f"{field}.{key}", f"must be a JSON value: {error}") from None
    return json.dumps(value, allow_nan=False, default=_plain, ensure_ascii=False)


def _plain(value: object) -> object:
    """numpy numbers and arrays as the plain numbers and lists that JSON has."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")
