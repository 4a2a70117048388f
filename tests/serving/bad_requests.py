"""Requests that must be refused, made from tables: what is wrong, and which input must be named.

Used below the server (the parser alone) and on a real one. Texts that a caller sent hold ``MARK``,
which no error may repeat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MARK = "XyZzYmark"
Tensors = dict[str, npt.NDArray[Any]]


class BadRequest(NamedTuple):
    name: str
    tensors: Tensors
    field: str  # that the message must name
    by_triton: bool = False  # the server itself refuses it, in its own words


NUMBERS = (
    "n", "best_of", "beam_width", "length_penalty", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens",
    "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "stream_interval",
    "priority",
)  # fmt: skip
NO_NUMBERS = (
    f'"{MARK}"', "[]", "{}", "[1]", "[[]]", "true", "1e400", "-1e400", '"NaN"', '"inf"', '"1e400"',
    '""', '"\\u0000"', '"\\ud800"', "1" + "0" * 400, "-1" + "0" * 400, '"' + "9" * 5000 + '"',
    f'{{"{MARK}": 1}}', "1e-400e", "0x10",
)  # fmt: skip
FLAGS = (
    "use_beam_search", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "skip_reading_prefix_cache",
)  # fmt: skip
NO_FLAGS = (f'"{MARK}"', "2", "-1", "[]", "{}", "[true]", '""', "1e400", '"\\ud800"', "0.5")
LISTS: dict[str, tuple[str, ...]] = {
    "stop": ("5", "true", "{}", "[1]", "[[]]", '[""]', json.dumps(["x"] * 17), f'["{MARK}", 1]'),
    "bad_words": ("5", "true", "{}", "[1]", "[[]]", '[""]', f'["{MARK}", null]'),
    "stop_token_ids": ("5", "{}", '["x"]', "[-1]", "[1e400]", "[[1]]", "[true]", f'["{MARK}"]'),
    "allowed_token_ids": ("5", "{}", "[]", '["x"]', "[-1]", "[1e400]", "[[1]]", f'["{MARK}"]'),
    "logit_bias": (
        "5", "[]", '{"x": 1}', '{"-1": 1}', '{"1": "x"}', '{"1": 101}', '{"1": 1e400}',
        '{"1": null}', f'{{"{MARK}": 1}}',
    ),
    "repetition_detection": (
        "5", "[]", '{"max_pattern_size": 3}', '{"max_pattern_size": -1}', f'{{"{MARK}": 1}}',
        '{"max_pattern_size": 1e400, "min_count": 2}', '{"max_pattern_size": "x", "min_count": 2}',
    ),
    "early_stopping": ('"sometimes"', "2", "[]", "{}", f'"{MARK}"'),
    "structured_outputs": (
        "5", "[]", "{}", f'"{MARK}"', '{"regex": 5}', '{"choice": []}', '{"choice": [1]}',
        '{"json": 5}', f'{{"{MARK}": 1}}', '{"regex": "a", "choice": ["a"]}', '{"grammar": []}',
    ),
    "response_format": ("5", "[]", "{}", '{"type": 5}', f'{{"type": "{MARK}"}}'),
}  # fmt: skip
TEXTS = ("text_input", "sampling_parameters", "chat", "control", "cache_salt")
BOOLEANS = (
    "stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob",
    "return_logprobs", "return_num_input_tokens", "return_num_output_tokens", "return_token_ids",
    "return_stop_reason", "return_num_cached_tokens", "return_prompt_logprobs",
    "return_perf_metrics",
)  # fmt: skip
NOT_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"abc\x80", b"\xc0\x80")
NOT_JSON = (
    "{", "}", "", "nul", "NaN", "[1,]", '{"a":1,}', "{'a': 1}", "[" * 100_000, '{"a":' * 500,
    '"' + MARK, "\x00", '{"a": Infinity}', "\ufeff{}", "// " + MARK, "9" * 5000,
)  # fmt: skip
NO_OBJECTS = ("5", '"x"', "[]", "null", "true", f'["{MARK}"]')


def text(value: str | bytes) -> npt.NDArray[Any]:
    return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)


def with_sampling(value: str) -> Tensors:
    return {"text_input": text(MARK), "sampling_parameters": text(value)}


def _sampling() -> Iterator[BadRequest]:
    def one(key: str, value: str, number: int) -> BadRequest:
        # What Python does not read as JSON at all is refused as a whole.
        try:
            json.loads(value)
            field = f"sampling_parameters.{key}"
        except ValueError:
            field = "sampling_parameters"
        return BadRequest(f"{key} {number}", with_sampling(f'{{"{key}": {value}}}'), field)

    for keys, values in ((NUMBERS, NO_NUMBERS), (FLAGS, NO_FLAGS)):
        for key in keys:
            for number, value in enumerate(values):
                yield one(key, value, number)
    for key, values in LISTS.items():
        for number, value in enumerate(values):
            yield one(key, value, number)
    for number, value in enumerate(NOT_JSON):
        if value:  # an empty text asks for nothing
            yield BadRequest(f"not JSON {number}", with_sampling(value), "sampling_parameters")
    for number, value in enumerate(NO_OBJECTS):
        yield BadRequest(f"no object {number}", with_sampling(value), "sampling_parameters")
    for number, key in enumerate((MARK, "", "\\u0000", "\\ud800", MARK * 2000, "temperature ")):
        yield BadRequest(
            f"unknown key {number}", with_sampling(f'{{"{key}": 1}}'), "sampling_parameters"
        )
    twice = f'{{"temperature": 1, "temperature": "{MARK}"}}'
    yield BadRequest("a key twice", with_sampling(twice), "sampling_parameters.temperature")
    for value in ('{"max_tokens": 100000}', '{"min_tokens": 9, "max_tokens": 5}', '{"n": 65}'):
        field = "sampling_parameters." + value.split('"')[1]
        yield BadRequest(value, with_sampling(value), field)


def _prompts() -> Iterator[BadRequest]:
    for name in TEXTS:
        for number, value in enumerate(NOT_UTF8):
            tensors = {name: text(value)}
            if name in ("sampling_parameters", "cache_salt"):
                tensors["text_input"] = text(MARK)
            yield BadRequest(f"{name} is no UTF-8, {number}", tensors, name)
    for name in ("chat", "control"):
        for number, value in enumerate(NOT_JSON):
            yield BadRequest(f"{name} is no JSON, {number}", {name: text(value)}, name)
    for number, value in enumerate(("5", '"x"', "null", "true")):
        yield BadRequest(f"chat is no object, {number}", {"chat": text(value)}, "chat")
    for number, value in enumerate(NO_OBJECTS):
        yield BadRequest(f"control is no object, {number}", {"control": text(value)}, "control")
    messages: tuple[Any, ...] = (
        None, 5, {}, "x", [], [5], ["x"], [[]], [{}], [{"role": "user"}], [{"content": MARK}],
        [{"role": 5, "content": MARK}], [{"role": MARK, "content": 5}],
        [{"role": "user", "content": {MARK: 1}}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": MARK}]}],
        [{"role": "user", "content": MARK}] * 2049,
    )  # fmt: skip
    for number, value in enumerate(messages):
        chat = text(json.dumps({"messages": value}))
        yield BadRequest(f"messages {number}", {"chat": chat}, "chat")
    hello = [{"role": "user", "content": MARK}]
    for key, value in (
        (MARK, 1), ("tool_choice", MARK), ("tool_choice", 5), ("tools", 5), ("tools", [5]),
        ("add_generation_prompt", MARK), ("continue_final_message", 1),
        ("chat_template_kwargs", 5), ("chat_template_kwargs", [MARK]),
    ):  # fmt: skip
        chat = text(json.dumps({"messages": hello, key: value}))
        yield BadRequest(f"chat {key} {value}", {"chat": chat}, "chat")
    controls: tuple[dict[str, Any], ...] = (
        {}, {"op": MARK}, {"op": 5}, {"op": []}, {"op": {}}, {"op": None}, {"op": "tokenize"},
        {"op": "tokenize", "text": 5}, {"op": "tokenize", "text": MARK, "add_special_tokens": 1},
        {"op": "tokenize", "text": MARK * 2000}, {"op": "detokenize"},
        {"op": "detokenize", "token_ids": MARK}, {"op": "detokenize", "token_ids": [MARK]},
        {"op": "detokenize", "token_ids": [-1]}, {"op": "detokenize", "token_ids": [2**70]},
        {"op": "detokenize", "token_ids": [True]}, {"op": "detokenize", "token_ids": [1.5]},
        {"op": "detokenize", "token_ids": [1] * 5000}, {"op": "tokenize", "text": "\ud800"},
    )  # fmt: skip
    for number, value in enumerate(controls):
        yield BadRequest(f"control {number}", {"control": text(json.dumps(value))}, "control")
    for ids in ([-1], [2**31 - 1], [-(2**31)], [1, 2, 100_000], [1] * 5000, []):
        array = np.array(ids, np.int32)
        yield BadRequest(f"input_ids {ids[:3]}", {"input_ids": array}, "input_ids")
    yield BadRequest("nothing at all", {"stream": np.array([True])}, "text_input")
    yield BadRequest("no text", {"text_input": text("")}, "text_input")
    yield BadRequest("too long", {"text_input": text(MARK * 10_000)}, "text_input")
    salt = {"text_input": text("x"), "cache_salt": text(MARK * 100)}
    yield BadRequest("a long salt", salt, "cache_salt")
    both = {"text_input": text(MARK), "input_ids": np.array([1], np.int32)}
    yield BadRequest("two prompts", both, "text_input")
    for name in ("image", "embedding_request"):
        yield BadRequest(name, {"text_input": text(MARK), name: text(MARK)}, name)
    echo = {"text_input": text(MARK), "stream": np.array([True])}
    echo["exclude_input_in_output"] = np.array([False])
    yield BadRequest("a streamed prompt", echo, "exclude_input_in_output")


def _shapes() -> Iterator[BadRequest]:
    """What Triton refuses by the contract in config.pbtxt."""
    for name in (*TEXTS, *BOOLEANS):
        element: Any = True if name in BOOLEANS else b"x"
        kind: Any = bool if name in BOOLEANS else np.object_
        for shape in ((2,), (1, 1), (0,)):
            tensors = {"text_input": text("x"), name: np.full(shape, element, kind)}
            yield BadRequest(f"{name} {shape}", tensors, name, by_triton=True)
        for other in (np.array([1], np.int32), np.array([1.0], np.float32)):
            tensors = {"text_input": text("x"), name: other}
            yield BadRequest(f"{name} {other.dtype}", tensors, name, by_triton=True)
    for array in (
        np.array([1], np.int64), np.array([1.0], np.float32), text("1"),
        np.array([[1, 2], [3, 4]], np.int32), np.array([True]),
    ):  # fmt: skip
        tensors = {"input_ids": array}
        yield BadRequest(f"ids {array.dtype} {array.shape}", tensors, "input_ids", by_triton=True)
    yield BadRequest("an unknown tensor", {"what": text("x")}, "what", by_triton=True)


def bad_requests() -> list[BadRequest]:
    """All of them."""
    return [*_sampling(), *_prompts(), *_shapes()]
