"""What a request asks of sampling: the parameters, their parsing and their checks.

Names and meanings are those of vLLM's SamplingParams. Values may arrive as strings, as NVIDIA's own
clients send them. A name that we do not know is refused; one that we know but cannot honour yet is
accepted at the value that asks for nothing and refused by name otherwise. Checks that need the model
(vocabulary, context length) are in :func:`check_against_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trident_llm.core import sampling_values as values_of
from trident_llm.core.block_pool import most_blocks_of_beams
from trident_llm.core.errors import invalid
from trident_llm.core.sampling_values import FIELD, LARGEST_INT, RepetitionDetection, bad

MAX_N = 64
MAX_STOP_TOKEN_IDS = 1024
GREEDY_BELOW = 1e-5  # temperatures under this choose the most likely token

# Names that describe the output's form. What they hold is read where grammars are known.
GRAMMAR_PARAMETERS = (
    "structured_outputs",
    "guided_decoding",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
    "response_format",
)


@dataclass(frozen=True)
class SamplingParams:
    """Validated parameters of one request. ``max_tokens`` None means: to the end of the context."""

    n: int = 1
    best_of: int | None = None  # sequences to generate, of which the n most likely are returned
    use_beam_search: bool = False
    beam_width: int | None = None  # beams of a search, of which the n best are returned
    length_penalty: float = 1.0  # a beam is worth logprob / length ** length_penalty
    early_stopping: bool | Literal["never"] = False  # when a search ends; as in transformers
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # 0: the prompt is computed, and scored if asked
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # set by tokenize_bad_words
    truncate_prompt_tokens: int | None = None  # -1: to what fits the context
    repetition_detection: RepetitionDetection | None = None
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

    @property
    def num_sequences(self) -> int:
        """Sequences to generate: those to choose from, or a search's beams."""
        if self.use_beam_search:
            assert self.beam_width is not None
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    @property
    def sampled_logprobs(self) -> int | None:
        """Most likely tokens wanted beside each sampled one; choosing the best needs the latter."""
        if self.use_beam_search:
            return None
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached prompt tokens may be left out of the computation."""
        return not self.skip_reading_prefix_cache and self.prompt_logprobs is None


def _whole(low: int, high: int = LARGEST_INT) -> Callable[[str, Any], int]:
    return lambda name, value: values_of.integer(name, value, low, high)


def _optional_whole(low: int, high: int = LARGEST_INT) -> Callable[[str, Any], int | None]:
    return lambda name, value: values_of.optional_integer(name, value, low, high)


def _between(low: float, high: float) -> Callable[[str, Any], float]:
    return lambda name, value: values_of.number_between(name, value, low, high)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "n": _whole(1, MAX_N),
    "best_of": _optional_whole(1, MAX_N),
    "use_beam_search": values_of.boolean,
    "beam_width": _optional_whole(1, MAX_N),
    "length_penalty": _between(-10, 10),
    "early_stopping": values_of.early_stopping,
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "repetition_penalty": values_of.repetition_penalty,
    "temperature": _between(0, 1000),
    "top_p": values_of.top_p,
    "top_k": lambda name, value: max(0, values_of.integer(name, value, -1, LARGEST_INT)),
    "min_p": _between(0, 1),
    "seed": _optional_whole(-(2**63), 2**64 - 1),
    "stop": values_of.stop_strings,
    "stop_token_ids": lambda name, value: values_of.token_ids(name, value, MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": values_of.boolean,
    "ignore_eos": values_of.boolean,
    "max_tokens": _optional_whole(0),
    "min_tokens": _whole(0),
    "logprobs": _optional_whole(0),
    "prompt_logprobs": _optional_whole(0),
    "logit_bias": values_of.logit_bias,
    "allowed_token_ids": values_of.allowed_token_ids,
    "bad_words": values_of.bad_words,
    "truncate_prompt_tokens": values_of.truncate_prompt_tokens,
    "repetition_detection": values_of.repetition_detection,
    "skip_special_tokens": values_of.boolean,
    "spaces_between_special_tokens": values_of.boolean,
    "detokenize": values_of.boolean,
    "skip_reading_prefix_cache": values_of.boolean,
    "stream_interval": _whole(1),
    "priority": _whole(-(2**31)),
}

# Known names that are not supported yet, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "lora_name": (None, ""),
    "flat_logprobs": (False,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "thinking_token_budget": (None,),
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

    What :data:`GRAMMAR_PARAMETERS` name is left to others. ``defaults`` fill what ``values`` leaves
    out (a model's generation_config). ``ignore_unknown`` is for request parameters, where headers
    and traces arrive under names of their own.

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
                raise bad(name, "is not supported; leave it out")
        elif not ignore_unknown and name not in GRAMMAR_PARAMETERS:
            known = ", ".join(sorted((*_PARSERS, *GRAMMAR_PARAMETERS)))
            raise invalid(FIELD, f"holds an unknown name; the supported ones are: {known}")
    params = replace(defaults or SamplingParams(), **parsed)
    params = _with_beams(params, parsed) if params.use_beam_search else _without_beams(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise bad("min_tokens", f"must be at most max_tokens, which is {params.max_tokens}")
    if params.stop and not params.detokenize:
        raise bad("stop", "needs detokenize to be true; use stop_token_ids with ids alone")
    if params.num_sequences < params.n:
        raise bad("best_of", f"must be at least n, which is {params.n}")
    if params.max_tokens == 0 and params.num_sequences > 1:
        name = "use_beam_search" if params.use_beam_search else "n" if params.n > 1 else "best_of"
        raise bad(name, "must be left out when max_tokens is 0: nothing is generated")
    if params.greedy and params.num_sequences > 1 and not params.use_beam_search:
        name = "n" if params.n > 1 else "best_of"
        raise bad(name, "must be 1 when temperature is 0: greedy sequences would all be equal")
    return params


def _with_beams(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """``params`` of a beam search: its width found, and nothing in it that draws or cannot be told.

    Args:
        given: what the request itself says; a model's defaults are for drawing, and fall away.
    """
    neutral = SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "logprobs", "repetition_detection"):
        value = getattr(params, name)
        if (
            name in given
            and value != getattr(neutral, name)
            and (name, value) != ("temperature", 0)
        ):
            raise bad(name, "cannot be combined with use_beam_search; leave it out")
        params = replace(params, **{name: getattr(neutral, name)})
    if params.best_of is not None and params.beam_width is not None:
        raise bad("best_of", "cannot be combined with beam_width; leave it out")
    width = params.beam_width or params.best_of or params.n
    if width < 2:
        raise bad("beam_width", "must be at least 2 with use_beam_search; set it")
    if width < params.n:
        name = "beam_width" if params.best_of is None else "best_of"
        raise bad(name, f"must be at least n, which is {params.n}")
    return replace(params, beam_width=width, best_of=None)


def _without_beams(params: SamplingParams) -> SamplingParams:
    if params.beam_width == 1:
        params = replace(params, beam_width=None)
    neutral = SamplingParams()
    for name in ("beam_width", "length_penalty", "early_stopping"):
        if getattr(params, name) != getattr(neutral, name):
            raise bad(name, "needs use_beam_search to be true; leave it out without it")
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
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: values[name] for name in names if values.get(name) is not None}
    return parse_sampling_params(given)


def tokenize_bad_words(
    params: SamplingParams, encode: Callable[[str], list[int]]
) -> SamplingParams:
    """``params`` with the token sequences that spell its bad words.

    A word counts at the beginning of a text and, after a blank, within it: both spellings are kept.

    Args:
        encode: gives a text's token ids, with no special tokens added.

    Raises:
        RequestError: INVALID_ARG naming ``bad_words``.
    """
    if not params.bad_words:
        return params
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        spelled = word.lstrip()
        for text in (spelled, " " + spelled):
            ids = tuple(encode(text))
            if ids:
                sequences[ids] = None
            elif text == spelled:
                raise bad("bad_words", "must hold words of at least one token")
    return replace(params, bad_words_token_ids=tuple(sequences))


def truncate_prompt(token_ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The last tokens of a prompt, as many as ``truncate_prompt_tokens`` keeps.

    -1 keeps what leaves room in the context for ``max_tokens``, or for one token without it.
    """
    most = params.truncate_prompt_tokens
    if most is None:
        return token_ids
    if most < 0:
        room = 1 if params.max_tokens is None else params.max_tokens
        most = max(1, max_model_len - room)
    return token_ids[-most:]


def check_against_model(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    vocab_size: int,
    max_num_seqs: int,
    max_logprobs: int,
    block_size: int,
    num_blocks: int,
    prompt_field: str = "text_input",
) -> SamplingParams:
    """``params`` with ``max_tokens`` resolved, once everything that needs the model is checked.

    Args:
        num_blocks: KV blocks of the pool, block 0 included, which holds nothing.
        prompt_field: the input that the prompt came in.

    Raises:
        RequestError: INVALID_ARG naming the field at fault.
    """
    if num_prompt_tokens + (params.max_tokens != 0) > max_model_len:
        output = "" if params.max_tokens == 0 else "with at least one output token "
        raise invalid(
            prompt_field,
            f"has {num_prompt_tokens} tokens; {output}it must fit max_model_len, which is "
            f"{max_model_len}",
        )
    room = max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens > room:
        raise bad(
            "max_tokens",
            f"must be at most {room}: the prompt has {num_prompt_tokens} tokens and max_model_len "
            f"is {max_model_len}",
        )
    if params.min_tokens > room:
        raise bad("min_tokens", f"must be at most {room}, the room left by the prompt")
    if params.num_sequences > max_num_seqs:
        name = "n" if params.n > max_num_seqs else "best_of"
        name = "beam_width" if params.use_beam_search else name
        raise bad(name, f"must be at most {max_num_seqs}, the sequences that run at once")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > max_logprobs:
            raise bad(name, f"must be at most {max_logprobs}")
    _check_token_ids(params, vocab_size)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if params.use_beam_search:
        width = params.num_sequences
        wanted = most_blocks_of_beams(num_prompt_tokens, max_tokens, width, block_size)
        if wanted >= num_blocks:
            raise bad(
                "beam_width",
                f"must be lower, or max_tokens: {width} beams of up to {max_tokens} tokens may take "
                f"{wanted} KV blocks, and there are {num_blocks - 1}",
            )
    return replace(params, max_tokens=max_tokens)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuses ids outside the vocabulary: they would index other rows' logits."""
    indexed: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": (token_id for token_id, _ in params.logit_bias),
        "bad_words": (token_id for ids in params.bad_words_token_ids for token_id in ids),
    }
    for name, token_ids in indexed.items():
        if any(token_id >= vocab_size for token_id in token_ids):
            raise bad(name, f"must hold ids below {vocab_size}, the vocabulary size")
    if params.allowed_token_ids is not None:
        forbidden = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
        if forbidden.issuperset(params.allowed_token_ids):
            raise bad("allowed_token_ids", "must hold a token that bad_words does not forbid")
