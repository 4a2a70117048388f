"""The model's contract: tensors in, tensors out. Plain values and numpy, no Triton objects.

The tables below are the contract, a superset of vllm_backend's; ``model_repository/llm/config.pbtxt``
states the same for Triton, and a test holds the two equal. A request is read in two steps: what must
be copied while Triton still owns the tensors (:class:`RawRequest`), and its meaning
(:func:`parse_request`), where everything invalid is refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trident_llm.core.errors import RequestError, invalid
from trident_llm.core.messages import TokenLogprob
from trident_llm.core.sampling_params import SamplingParams, parse_sampling_params
from trident_llm.engine.output import RequestOutput, RequestTimes, SequenceDelta
from trident_llm.text.grammar.spec import GrammarSpec, parse_grammar


class TensorSpec(NamedTuple):
    """One tensor of the contract; ``dims`` as in config.pbtxt."""

    data_type: str
    dims: list[int]


_TEXT = TensorSpec("TYPE_STRING", [1])
_FLAG = TensorSpec("TYPE_BOOL", [1])

INPUTS: dict[str, TensorSpec] = {
    "text_input": _TEXT,
    "image": TensorSpec("TYPE_STRING", [-1]),
    "stream": _FLAG,
    "sampling_parameters": _TEXT,
    "exclude_input_in_output": _FLAG,
    "return_finish_reason": _FLAG,
    "return_cumulative_logprob": _FLAG,
    "return_logprobs": _FLAG,
    "return_num_input_tokens": _FLAG,
    "return_num_output_tokens": _FLAG,
    "embedding_request": _TEXT,
    "input_ids": TensorSpec("TYPE_INT32", [-1]),
    "chat": _TEXT,
    "control": _TEXT,
    "cache_salt": _TEXT,
    "return_token_ids": _FLAG,
    "return_stop_reason": _FLAG,
    "return_num_cached_tokens": _FLAG,
    "return_prompt_logprobs": _FLAG,
    "return_perf_metrics": _FLAG,
}

OUTPUTS: dict[str, TensorSpec] = {
    "text_output": TensorSpec("TYPE_STRING", [-1]),
    "finish_reason": TensorSpec("TYPE_STRING", [-1]),
    "cumulative_logprob": TensorSpec("TYPE_FP32", [-1]),
    "logprobs": TensorSpec("TYPE_STRING", [-1]),
    "num_input_tokens": TensorSpec("TYPE_UINT32", [1]),
    "num_output_tokens": TensorSpec("TYPE_UINT32", [-1]),
    "token_ids": TensorSpec("TYPE_INT32", [-1]),
    "stop_reason": TensorSpec("TYPE_STRING", [-1]),
    "num_cached_tokens": TensorSpec("TYPE_UINT32", [1]),
    "prompt_logprobs": TensorSpec("TYPE_STRING", [1]),
    "arrival_time_ns": TensorSpec("TYPE_INT64", [1]),
    "first_scheduled_time_ns": TensorSpec("TYPE_INT64", [1]),
    "first_token_time_ns": TensorSpec("TYPE_INT64", [1]),
    "last_token_time_ns": TensorSpec("TYPE_INT64", [1]),
    "control_output": TensorSpec("TYPE_STRING", [1]),
}

MAX_MESSAGES = 2048
MAX_JSON_DEPTH = 64
MAX_SALT_CHARS = 256
_LOGPROB_BYTES = 96  # of one entry of the logprobs and prompt_logprobs outputs
MAX_RESPONSE_BYTES = 256 * 1024
# Added to a monotonic time. Taken once, so that a request's times fit together whatever the clock does.
_EPOCH_NS = time.time_ns() - time.monotonic_ns()

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RawRequest:
    """A request's inputs, copied out of Triton's memory and not yet looked at."""

    tensors: Mapping[str, Array]  # only the inputs that were sent
    parameters: str  # JSON object of the request parameters, "" if there are none
    timeout_us: int = 0  # the request's own timeout in microseconds, 0 if it has none


@dataclass(frozen=True)
class ParsedRequest:
    """What a request asks for. Exactly one of prompt_text, prompt_ids, chat, control is set."""

    prompt_text: str | None
    prompt_ids: list[int] | None
    chat: Mapping[str, Any] | None
    control: Mapping[str, Any] | None
    params: SamplingParams
    grammar: GrammarSpec | None  # what the output must follow
    stream: bool
    echo: bool  # the prompt's text goes before the output
    cache_salt: str
    shows_logprobs: bool  # the caller asked sampling for them, not only for their sum
    returns: frozenset[str]  # gated outputs that were asked for

    @property
    def prompt_field(self) -> str:
        """The input that the prompt came in."""
        if self.chat is not None:
            return "chat"
        return "input_ids" if self.prompt_text is None else "text_input"


def _scalar(raw: RawRequest, name: str) -> Any:
    """The single element of an input, or None if it was not sent."""
    array = raw.tensors.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise invalid(name, f"must hold exactly one element, not {array.size}")
    return array.reshape(-1)[0]


def read_flag(raw: RawRequest, name: str) -> bool | None:
    """A flag, or None if it was not sent."""
    value = _scalar(raw, name)
    return None if value is None else bool(value)


def read_text(raw: RawRequest, name: str) -> str | None:
    """A text, or None if it was not sent."""
    value = _scalar(raw, name)
    if value is None:
        return None
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise invalid(name, "must be valid UTF-8") from None


def _too_deep(value: Any, depth: int = MAX_JSON_DEPTH) -> bool:
    if depth == 0:
        return True
    if isinstance(value, dict):
        return any(_too_deep(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return any(_too_deep(item, depth - 1) for item in value)
    return False


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def parse_json(name: str, text: str) -> Any:
    """The JSON value in an input.

    Raises:
        RequestError: it is not JSON (NaN and Infinity are not), or nested too deep.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise invalid(name, "must be valid JSON") from None
    if _too_deep(value):
        raise invalid(name, f"must be nested at most {MAX_JSON_DEPTH - 1} levels deep")
    return value


def json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in an input. Raises :class:`RequestError`, as :func:`parse_json`."""
    value = parse_json(name, text)
    if not isinstance(value, dict):
        raise invalid(name, "must be a JSON object")
    return value


def _sampling_params(
    raw: RawRequest, defaults: SamplingParams
) -> tuple[SamplingParams, GrammarSpec | None]:
    """From the ``sampling_parameters`` input; only without it from the request parameters."""
    text = read_text(raw, "sampling_parameters")
    in_tensor = text is not None and bool(text.strip())
    if in_tensor:
        assert text is not None
        values = json_object("sampling_parameters", text)
    else:
        values = json_object("parameters", raw.parameters) if raw.parameters else {}
    params = parse_sampling_params(values, defaults=defaults, ignore_unknown=not in_tensor)
    grammar = parse_grammar(values)
    if grammar is not None and params.use_beam_search:
        raise invalid(grammar.error_field, "cannot be combined with use_beam_search; leave one out")
    return params, grammar


def request_timeout(raw: RawRequest) -> float | None:
    """Seconds that the request allows itself, from its arrival; None if it sets no limit.

    Over gRPC the parameter ``timeout`` is the request's own; over HTTP it is a plain parameter.

    Raises:
        RequestError: INVALID_ARG, it is no whole number of microseconds.
    """
    timeout: Any = raw.timeout_us
    if not timeout and '"timeout"' in raw.parameters:
        timeout = json_object("parameters", raw.parameters).get("timeout")
        if isinstance(timeout, str) and timeout.isdecimal():
            timeout = int(timeout[:20])
        if type(timeout) is not int or timeout < 0:
            raise invalid("timeout", "must be a whole number of microseconds")
    return timeout / 1e6 if timeout else None


def read_input_ids(raw: RawRequest) -> list[int] | None:
    """The token ids in ``input_ids``, or None if they were not sent."""
    array = raw.tensors.get("input_ids")
    if array is None:
        return None
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise invalid("input_ids", "must be one list of token ids")
    return [int(item) for item in array.reshape(-1)]


def _chat(raw: RawRequest) -> dict[str, Any] | None:
    text = read_text(raw, "chat")
    if text is None:
        return None
    value = parse_json("chat", text)
    chat = {"messages": value} if isinstance(value, list) else value
    if not isinstance(chat, dict):
        raise invalid("chat", 'must be a JSON object with "messages", or a list of messages')
    known = {
        "messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message",
    }  # fmt: skip
    for name in chat:
        if name not in known:
            raise invalid("chat", f"holds an unknown key; the keys are: {', '.join(sorted(known))}")
    messages = chat.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("chat.messages", f"must be a list of 1 to {MAX_MESSAGES} messages")
    if chat.get("tool_choice") not in (None, "auto", "none"):
        raise invalid("chat.tool_choice", 'must be "auto" or "none"')
    if not isinstance(chat.get("chat_template_kwargs") or {}, dict):
        raise invalid("chat.chat_template_kwargs", "must be a JSON object")
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in chat and not isinstance(chat[name], bool):
            raise invalid(f"chat.{name}", "must be true or false")
    return chat


def read_control(raw: RawRequest) -> dict[str, Any] | None:
    """The operation in ``control``, or None if none was sent."""
    text = read_text(raw, "control")
    return None if text is None else json_object("control", text)


def parse_request(raw: RawRequest, defaults: SamplingParams) -> ParsedRequest:
    """What ``raw`` asks for.

    Raises:
        RequestError: INVALID_ARG naming the input at fault.
    """
    for name, needed in (("image", "takes images"), ("embedding_request", "embeds")):
        if name in raw.tensors and raw.tensors[name].size:
            raise invalid(
                name, f"is not supported: this model generates text; send it to one that {needed}"
            )
    text, ids, chat = read_text(raw, "text_input"), read_input_ids(raw), _chat(raw)
    control = read_control(raw)
    given = [value for value in (text, ids, chat, control) if value is not None]
    if chat is not None and text == "":
        text = None  # clients that must send text_input send it empty beside a chat
        given.remove("")
    if len(given) != 1:
        raise invalid(
            "text_input", "exactly one of text_input, input_ids, chat and control must be given"
        )
    stream = bool(read_flag(raw, "stream"))
    exclude = read_flag(raw, "exclude_input_in_output")
    if stream and exclude is False:
        raise invalid(
            "exclude_input_in_output",
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        )
    salt = read_text(raw, "cache_salt") or ""
    if len(salt) > MAX_SALT_CHARS:
        raise invalid("cache_salt", f"must have at most {MAX_SALT_CHARS} characters")
    params, grammar = SamplingParams(), None
    if control is None:
        params, grammar = _sampling_params(raw, defaults)
    returns = frozenset(
        name.removeprefix("return_")
        for name in INPUTS
        if name.startswith("return_") and read_flag(raw, name)
    )
    shows_logprobs = params.logprobs is not None
    if "cumulative_logprob" in returns and not shows_logprobs:
        params = replace(params, logprobs=0)  # its sum needs the sampled tokens' own
    return ParsedRequest(
        prompt_text=text,
        prompt_ids=ids,
        chat=chat,
        control=control,
        params=params,
        grammar=grammar,
        stream=stream,
        echo=text is not None and not stream and not exclude,
        cache_salt=salt,
        shows_logprobs=shows_logprobs,
        returns=returns,
    )


def strings(values: list[str]) -> Array:
    """Texts as an output of type STRING."""
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)


class TokenText(NamedTuple):
    """A token by itself, as text; where it is only part of a character, its bytes if they are known."""

    text: str
    data: bytes | None = None


def _logprobs_json(
    tokens: Iterable[SequenceOf[TokenLogprob] | None], piece: Callable[[int], TokenText]
) -> str:
    """Log-probabilities as a list with an object per token, null where there are none."""

    def entry(logprob: TokenLogprob) -> dict[str, Any]:
        text, data = piece(logprob.token_id)
        return {
            # JSON has no infinity: a token that was masked out has the floor.
            "logprob": max(logprob.logprob, -9999.0),
            "rank": logprob.rank,
            "decoded_token": text,
            **({} if data is None else {"bytes": list(data)}),
        }

    items = [token and {str(item.token_id): entry(item) for item in token} for token in tokens]
    return json.dumps(items)


class ResponseBuilder:
    """Turns one request's outputs into the tensors of its responses.

    n > 1: every output has n elements, by index; a sequence without news has an empty text. Its state
    (finish reasons, cumulative log-probabilities) is kept from response to response.
    """

    def __init__(self, parsed: ParsedRequest, piece: Callable[[int], TokenText]) -> None:
        self._parsed = parsed
        self._piece = piece
        n = parsed.params.n
        self._finish: list[str] = ["None"] * n
        self._stop: list[str] = ["None"] * n
        self._cumulative = [0.0] * n
        self._prompt_told = False
        self.prompt_text = parsed.prompt_text if parsed.echo else ""

    def tensors(self, output: RequestOutput) -> dict[str, Array]:
        """The response's tensors by name."""
        parsed, returns = self._parsed, self._parsed.returns
        deltas = [
            output.deltas.get(index) or SequenceDelta(index, cumulative_logprob=value)
            for index, value in enumerate(self._cumulative)
        ]
        for delta in deltas:
            self._cumulative[delta.index] = delta.cumulative_logprob
            if delta.finish_reason is not None:
                self._finish[delta.index] = delta.finish_reason.value
                self._stop[delta.index] = str(delta.stop_reason)
        prompt = self.prompt_text or ""
        tensors = {"text_output": strings([prompt + delta.text for delta in deltas])}
        if "finish_reason" in returns:
            tensors["finish_reason"] = strings(self._finish)
        if "stop_reason" in returns:
            tensors["stop_reason"] = strings(self._stop)
        if "cumulative_logprob" in returns:
            tensors["cumulative_logprob"] = np.array(self._cumulative, np.float32)
        if "logprobs" in returns:
            limit = parsed.params.logprobs or 0
            tensors["logprobs"] = strings(
                [
                    _logprobs_json((token[: limit + 1] for token in delta.logprobs), self._piece)
                    if parsed.shows_logprobs
                    else "null"
                    for delta in deltas
                ]
            )
        if "prompt_logprobs" in returns and not self._prompt_told:
            self._prompt_told = True
            scores = output.prompt_logprobs
            text = "null" if scores is None else _logprobs_json(scores, self._piece)
            tensors["prompt_logprobs"] = strings([text])
        if "num_input_tokens" in returns:
            tensors["num_input_tokens"] = np.array([output.num_prompt_tokens], np.uint32)
        if "num_output_tokens" in returns:
            tensors["num_output_tokens"] = np.array([len(d.token_ids) for d in deltas], np.uint32)
        if "token_ids" in returns:
            tensors["token_ids"] = np.array([i for d in deltas for i in d.token_ids], np.int32)
        if "num_cached_tokens" in returns:
            tensors["num_cached_tokens"] = np.array([output.num_cached_tokens], np.uint32)
        if "perf_metrics" in returns:
            tensors.update(_times(output.times))
        return tensors


def _times(times: RequestTimes) -> dict[str, Array]:
    """Moments in nanoseconds since 1970; 0 for what has not happened."""
    moments = {
        "arrival_time_ns": times.arrival,
        "first_scheduled_time_ns": times.first_scheduled,
        "first_token_time_ns": times.first_token,
        "last_token_time_ns": times.last_token,
    }
    return {
        name: np.array([round(moment * 1e9) + _EPOCH_NS if moment else 0], np.int64)
        for name, moment in moments.items()
    }


def output_bytes(output: RequestOutput) -> int:
    """About how many bytes of response ``output`` makes, rather too many than too few."""
    size = sum(
        4 * len(delta.text)
        + 8 * len(delta.token_ids)
        + _LOGPROB_BYTES * sum(len(token) for token in delta.logprobs)
        for delta in output.deltas.values()
    )
    return size + _LOGPROB_BYTES * sum(len(token or ()) for token in output.prompt_logprobs or ())


def check_prompt_logprobs(parsed: ParsedRequest, num_prompt_tokens: int) -> None:
    """Refuses a ``prompt_logprobs`` output that would not fit into the one response that has it.

    Raises:
        RequestError: INVALID_ARG that says how many tokens a prompt may have.
    """
    count = parsed.params.prompt_logprobs
    if count is None or "prompt_logprobs" not in parsed.returns:
        return
    most = MAX_RESPONSE_BYTES // (_LOGPROB_BYTES * (count + 1))
    if num_prompt_tokens > most:
        raise invalid(
            "return_prompt_logprobs",
            f"is for prompts of at most {most} tokens with prompt_logprobs {count}, and this one has "
            f"{num_prompt_tokens}; ask for fewer log-probabilities or send a shorter prompt",
        )


def error_text(error: RequestError) -> str:
    """The message that a client reads: code and field first."""
    return str(error)
