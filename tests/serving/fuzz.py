"""Random requests read, for as long as is wanted: ``python -m tests.serving.fuzz --requests 100000``.

A request is either read or refused with INVALID_ARG; nothing else may come of it, and no refusal
repeats what was sent.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.serving.bad_requests import BOOLEANS, FLAGS, LISTS, MARK, NUMBERS, TEXTS
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.serving.protocol import INPUTS, RawRequest, parse_request, request_timeout

# Text with the mark, with control characters, and halves of surrogate pairs as JSON can write them.
texts = st.one_of(
    st.just(MARK), st.just(""), st.just("\x00"), st.just("\ud800"), st.text(max_size=20),
    st.sampled_from(["true", "false", "1", "-1", "1e400", "NaN", "auto", "never"]),
)  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 70), st.floats(), texts,
    st.sampled_from([2**63, -(2**63), 2**64, 10**400, 1e308, -0.0, 1e-320]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
names = st.one_of(
    st.sampled_from([*NUMBERS, *FLAGS, *LISTS, "guided_json", "guided_regex", "lora_name"]), texts
)
chats = st.fixed_dictionaries(
    {"messages": values},
    optional={
        "tools": values, "tool_choice": values, "chat_template_kwargs": values,
        "add_generation_prompt": values, "continue_final_message": values,
    },
)  # fmt: skip


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


contents = {
    "text_input": st.one_of(st.just(MARK.encode()), st.binary(max_size=20)),
    "sampling_parameters": st.one_of(
        st.dictionaries(names, values, max_size=4).map(_encoded), st.binary(max_size=20)
    ),
    "chat": st.one_of(chats.map(_encoded), values.map(_encoded), st.binary(max_size=20)),
    "control": st.one_of(values.map(_encoded), st.binary(max_size=20)),
    "cache_salt": st.one_of(st.binary(max_size=20), st.just(MARK.encode() * 40)),
}
assert contents.keys() == set(TEXTS) and INPUTS.keys() >= set(TEXTS)


def _objects(strategy: st.SearchStrategy[bytes]) -> st.SearchStrategy[Any]:
    lists = st.one_of(st.lists(strategy, min_size=1, max_size=1), st.lists(strategy, max_size=3))
    return lists.map(lambda items: np.array(items, dtype=np.object_))


arrays = {name: _objects(strategy) for name, strategy in contents.items()}
arrays |= {
    name: st.lists(st.booleans(), min_size=0, max_size=2).map(lambda items: np.array(items, bool))
    for name in BOOLEANS
}
arrays["input_ids"] = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(
    lambda items: np.array(items, np.int32)
)
raw_requests = st.builds(
    RawRequest,
    st.one_of(
        st.fixed_dictionaries({}, optional=arrays),
        st.fixed_dictionaries({"text_input": arrays["text_input"]}, optional={
            "sampling_parameters": arrays["sampling_parameters"],
        }),
    ),
    st.one_of(
        st.just(""), st.dictionaries(st.one_of(names, st.just("timeout")), values).map(json.dumps)
    ),
    st.integers(0, 2**63 - 1),
)  # fmt: skip
num_read = 0
num_refused = 0


def check(raw: RawRequest) -> None:
    """Reads one request as the door does."""
    global num_read, num_refused
    for read in (request_timeout, lambda raw: parse_request(raw, SamplingParams())):
        refusal = None
        try:
            read(raw)
        except RequestError as error:
            refusal = error
        if refusal is not None:
            assert refusal.code is ErrorCode.INVALID_ARG
            assert MARK not in str(refusal)
            assert set(refusal.field) <= set(string.ascii_letters + "._0123456789")
            num_refused += 1
    num_read += 1


def run(count: int, seed: int | None = None) -> None:
    """Reads ``count`` random requests; always the same ones without a ``seed``."""

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=seed is None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(raw_requests)
    def test(raw: RawRequest) -> None:
        check(raw)

    (test if seed is None else hypothesis.seed(seed)(test))()


def main() -> None:
    parser = argparse.ArgumentParser(description="random requests, read as a server reads them")
    parser.add_argument("--requests", type=int, default=100_000, help="how many, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    began, seed = time.monotonic(), arguments.seed
    while num_read < arguments.requests:
        run(2000, seed)
        seconds = time.monotonic() - began
        print(
            f"seed {seed}: {num_read:,} read, {num_refused:,} refusals, {seconds:.0f} s", flush=True
        )
        seed += 1


if __name__ == "__main__":
    main()
