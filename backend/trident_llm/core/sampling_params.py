"""What a request asks of sampling: the parameters, their parsing and their checks.

Names and meanings are those of vLLM's SamplingParams. Values may arrive as strings, as NVIDIA's own
clients send them. A name that we do not know is refused; one that we know but cannot honour yet is
accepted at the value that asks for nothing and refused by name otherwise. Checks that need the model
(vocabulary, context length) are in :func:`check_against_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trident_llm.core.errors import invalid

FIELD = "sampling_parameters"
MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
GREEDY_BELOW = 1e-5  # temperatures under this choose the most likely token


@dataclass(frozen=True)
class SamplingParams:
    """Validated parameters of one request. ``max_tokens`` None means: to the end of the context."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    skip_reading_prefix_cache: bool = False
    stream_interval: int = 1
    priority: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature < GREEDY_BELOW


def _bad(name: str, reason: str) -> Exception:
    return invalid(f"{FIELD}.{name}", reason)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    number: int | None = None
    if isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            number = None
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None:
        raise _bad(name, "must be a whole number")
    if not low <= number <= high:
        raise _bad(name, f"must be between {low} and {high}")
    return number


def _number(name: str, value: Any) -> float:
    number: float | None = None
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = None
    if number is None or not math.isfinite(number):
        raise _bad(name, "must be a finite number")
    return number


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise _bad(name, "must be true or false")


def _temperature(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0.0 <= number <= 1000.0:
        raise _bad(name, "must be between 0 and 1000")
    return number


def _top_p(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0.0 < number <= 1.0:
        raise _bad(name, "must be above 0 and at most 1")
    return number


def _min_p(name: str, value: Any) -> float:
    number = _number(name, value)
    if not 0.0 <= number <= 1.0:
        raise _bad(name, "must be between 0 and 1")
    return number


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(name, value, -1, 2**31 - 1))


def _seed(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, -(2**63), 2**64 - 1)


def _max_tokens(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 1, 2**31 - 1)


def _logprobs(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 0, 2**31 - 1)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise _bad(name, "must be a string or a list of strings")
    if any(s == "" for s in strings):
        raise _bad(name, "must not hold an empty string; leave it out to stop at nothing")
    if len(strings) > MAX_STOP_STRINGS:
        raise _bad(name, f"must hold at most {MAX_STOP_STRINGS} strings")
    if any(len(s) > MAX_STOP_CHARS for s in strings):
        raise _bad(name, f"must hold strings of at most {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > 1024:
        raise _bad(name, "must be a list of at most 1024 token ids")
    return tuple(dict.fromkeys(_integer(name, item, 0, 2**31 - 1) for item in value))


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "n": lambda name, value: _integer(name, value, 1, MAX_N),
    "temperature": _temperature,
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _min_p,
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "max_tokens": _max_tokens,
    "min_tokens": lambda name, value: _integer(name, value, 0, 2**31 - 1),
    "logprobs": _logprobs,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "detokenize": _boolean,
    "skip_reading_prefix_cache": _boolean,
    "stream_interval": lambda name, value: _integer(name, value, 1, 2**31 - 1),
    "priority": lambda name, value: _integer(name, value, -(2**31), 2**31 - 1),
}

# Known names that are not supported yet, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "use_beam_search": (False, None),
    "beam_width": (None, 1),
    "length_penalty": (1,),
    "early_stopping": (False, None),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json_object": (None, False),
    "response_format": (None,),
    "truncate_prompt_tokens": (None,),
    "lora_name": (None, ""),
    "flat_logprobs": (False,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
}


def parse_sampling_params(
    values: Mapping[str, Any],
    *,
    defaults: SamplingParams | None = None,
    ignore_unknown: bool = False,
) -> SamplingParams:
    """Parameters from the JSON object that a request carries.

    ``defaults`` fill what ``values`` leaves out (a model's generation_config). ``ignore_unknown`` is
    for request parameters, where headers and traces arrive under names of their own.

    Raises:
        RequestError: INVALID_ARG naming ``sampling_parameters.<name>``.
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        parser = _PARSERS.get(name)
        if parser is not None:
            parsed[name] = parser(name, value)
        elif name in _UNSUPPORTED:
            if not _asks_for_nothing(value, _UNSUPPORTED[name]):
                raise _bad(name, "is not supported; leave it out")
        elif not ignore_unknown:
            known = ", ".join(sorted(_PARSERS))
            raise invalid(FIELD, f"holds an unknown name; the supported ones are: {known}")
    params = replace(defaults or SamplingParams(), **parsed)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _bad("min_tokens", f"must be at most max_tokens, which is {params.max_tokens}")
    if params.stop and not params.detokenize:
        raise _bad("stop", "needs detokenize to be true; use stop_token_ids with ids alone")
    if params.greedy and params.n > 1:
        raise _bad("n", "must be 1 when temperature is 0: greedy sequences would all be equal")
    return params


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, str) and value != "":
        lowered = value.strip().lower()
        if lowered in ("none", "null", "false"):
            return None in neutral or False in neutral
        try:
            value = float(lowered)
        except ValueError:
            return False
    return any(
        value == item and isinstance(value, bool) <= isinstance(item, bool) for item in neutral
    )


def defaults_from_generation_config(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling defaults out of a model's ``generation_config.json``; explicit values win over them.

    Only the fields that shape the distribution are taken: lengths and ends are the request's own.
    """
    if values.get("do_sample") is False:
        return SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p")
    given = {name: values[name] for name in names if values.get(name) is not None}
    return parse_sampling_params(given)


def check_against_model(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    max_num_seqs: int,
    max_logprobs: int,
) -> SamplingParams:
    """``params`` with ``max_tokens`` resolved, once everything that needs the model is checked.

    Raises:
        RequestError: INVALID_ARG naming the field at fault.
    """
    if num_prompt_tokens >= max_model_len:
        raise invalid(
            "text_input",
            f"has {num_prompt_tokens} tokens; with at least one output token it must fit "
            f"max_model_len, which is {max_model_len}",
        )
    room = max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens > room:
        raise _bad(
            "max_tokens",
            f"must be at most {room}: the prompt has {num_prompt_tokens} tokens and max_model_len "
            f"is {max_model_len}",
        )
    if params.min_tokens > room:
        raise _bad("min_tokens", f"must be at most {room}, the room left by the prompt")
    if params.n > max_num_seqs:
        raise _bad("n", f"must be at most {max_num_seqs}, the sequences that run at once")
    if params.logprobs is not None and params.logprobs > max_logprobs:
        raise _bad("logprobs", f"must be at most {max_logprobs}")
    if any(token_id >= vocab_size for token_id in params.stop_token_ids):
        raise _bad("stop_token_ids", f"must hold ids below {vocab_size}, the vocabulary size")
    return replace(params, max_tokens=params.max_tokens or room)
