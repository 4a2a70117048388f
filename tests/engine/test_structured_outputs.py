"""Outputs that follow a grammar, on the engine: whatever the model says, and whatever else happens."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.engine.harness import Harness, Outcome, make_engine
from tests.text.grammar.walks import compile_here
from trident_llm.core.errors import ErrorCode
from trident_llm.core.request import FinishReason
from trident_llm.engine.grammar import COMPLETE
from trident_llm.text.grammar.backend import Backend, Vocabulary
from trident_llm.text.grammar.matcher import CompiledGrammar, GrammarMatcher
from trident_llm.text.grammar.spec import parse_grammar
from trident_llm.text.tokenizer import Tokenizer

VOCAB = 480
WORD = {"type": "string", "maxLength": 6}
PLACE = {
    "type": "object",
    "properties": {"city": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["city", "zip"],
    "additionalProperties": False,
}

# Short ones, so that a model that says anything comes to an end within its context.
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}}, "required": ["name", "age"], "additionalProperties": False},
    PLACE,
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    {"enum": ["yes", "no", 1, None]},
    {"type": "object", "properties": {"tool": {"const": "weather"}, "arguments": PLACE}, "required": ["tool", "arguments"], "additionalProperties": False},
    {"anyOf": [{"type": "boolean"}, WORD]},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 5},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "additionalProperties": False},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
]  # fmt: skip


class Compiler:
    """Compiles for one vocabulary, without a process of its own; the same spec once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.backend = Backend(vocabulary)
        self.known: dict[Any, CompiledGrammar] = {}

    def __call__(self, **values: Any) -> CompiledGrammar:
        spec = parse_grammar(values)
        assert spec is not None
        if spec not in self.known:
            self.known[spec] = compile_here(self.backend, spec)
        return self.known[spec]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def grammar(tokenizer: Tokenizer) -> Compiler:
    assert tokenizer.eos_token_id is not None
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer, vocab_size=tokenizer.vocab_size, stop_ids=[tokenizer.eos_token_id]
    )
    assert vocabulary is not None
    return Compiler(vocabulary)


def schema_of(schema: Any, whitespace: bool = True) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": not whitespace}}


HOT = {"temperature": 2.0, "max_tokens": 190, "ignore_eos": False}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def check(outcome: Outcome, schema: Any) -> None:
    assert outcome.error is None
    assert outcome.finish_reason is FinishReason.STOP and outcome.stop_reason is None
    jsonschema.validate(json.loads(outcome.text), schema)


@pytest.mark.parametrize(
    ("depth", "settings"),
    [
        (0, {"num_blocks": 400, "max_num_seqs": 44}),
        (2, {"num_blocks": 58, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 48}),
    ],
    ids=["many at once", "ahead, chunked and preempted"],
)
def test_a_thousand_hot_requests_all_validate(
    tiny_model: Path, grammar: Compiler, depth: int, settings: dict[str, Any]
) -> None:
    harness = Harness(make_engine(tiny_model, launch_depth=depth, **settings))
    count = 1000 if depth == 0 else 60
    names = []
    for seed, prompt in enumerate(prompts(count)):
        schema = SCHEMAS[seed % len(SCHEMAS)]
        compiled = grammar(**schema_of(schema, whitespace=False))
        names.append((harness.add(prompt, grammar=compiled, seed=seed, **HOT), schema))
    harness.run()
    for name, schema in names:
        check(harness.outcomes[name, 0], schema)
    if depth:
        assert harness.engine.scheduler.stats.num_preemptions > 5


def test_neighbours_preemption_and_launching_ahead_change_nothing(
    tiny_model: Path, grammar: Compiler
) -> None:
    """Requests with a grammar, with several sequences and without one, as each is alone."""
    rng = random.Random(1)
    cases: list[tuple[list[int], dict[str, Any]]] = []
    for seed, prompt in enumerate(prompts(12)):
        params: dict[str, Any] = {**HOT, "seed": seed, "max_tokens": 60}
        if seed % 3:
            params["grammar"] = grammar(**schema_of(rng.choice(SCHEMAS)))
        if seed % 4 == 1:
            params["n"] = 3
        cases.append((prompt, params))
    alone = Harness(make_engine(tiny_model, num_blocks=200))
    crowded = Harness(
        make_engine(
            tiny_model, launch_depth=2, num_blocks=56, block_size=4, max_num_seqs=8,
            max_num_batched_tokens=24,
        )
    )  # fmt: skip
    wanted, names = [], []
    for prompt, params in cases:
        wanted.append(alone.add(prompt, **params))
        alone.run()
        names.append(crowded.add(prompt, **params))
    crowded.run()
    assert crowded.engine.scheduler.stats.num_preemptions > 5
    for mine, its, (_, params) in zip(names, wanted, cases):
        for index in range(params.get("n", 1)):
            assert crowded.outcomes[mine, index].token_ids == alone.outcomes[its, index].token_ids


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"guided_regex": r"[a-f]{3}-\d{2}"}, r"[a-f]{3}-\d{2}"),
        ({"guided_choice": ["Positive", "Negative"]}, r"Positive|Negative"),
        ({"guided_grammar": 'root ::= "<" [x-z]+ ">"'}, r"<[x-z]+>"),
        ({"structured_outputs": '{"choice": ["a", "b"]}'}, r"a|b"),
    ],
)
def test_every_kind_of_description_is_followed(
    tiny_model: Path, grammar: Compiler, values: dict[str, Any], pattern: str
) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    names = [
        harness.add(prompt, grammar=grammar(**values), seed=seed, **{**HOT, "n": 2})
        for seed, prompt in enumerate(prompts(5))
    ]
    harness.run()
    for name in names:
        for index in range(2):
            outcome = harness.outcomes[name, index]
            assert re.fullmatch(pattern, outcome.text), outcome.text
            assert outcome.finish_reason is FinishReason.STOP


def test_whitespace_cannot_fill_the_output(
    tiny_model: Path, grammar: Compiler, tokenizer: Tokenizer
) -> None:
    """A model that prefers blanks above all gets at most eight between two tokens of JSON."""
    blanks = [id_ for id_ in range(VOCAB) if tokenizer.token_bytes(id_).strip() == b""]
    assert blanks
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    outcome = harness.generate(
        [5, 6], grammar=grammar(**schema_of(SCHEMAS[0])), **HOT,
        logit_bias=tuple((id_, 90.0) for id_ in blanks),
    )  # fmt: skip
    check(outcome, SCHEMAS[0])
    assert re.search(r"\s{8}", outcome.text) and not re.search(r"\s{9}", outcome.text)


def test_the_end_comes_with_the_grammars_end(tiny_model: Path, grammar: Compiler) -> None:
    """min_tokens and ignore_eos say nothing of an output that can only end."""
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    short = grammar(guided_choice=["a", "bb"])
    for params in ({"min_tokens": 20}, {"ignore_eos": True}):
        outcome = harness.generate([7, 8, 9], grammar=short, **{**HOT, **params})
        assert outcome.text in ("a", "bb")
        assert outcome.finish_reason is FinishReason.STOP and outcome.stop_reason is None
    # Where it can go on, min_tokens makes it.
    longer = harness.generate([7, 8], grammar=grammar(guided_regex="a*"), min_tokens=9, **HOT)
    assert len(longer.token_ids) >= 10 and set(longer.text) == {"a"}


def test_max_tokens_ends_in_the_middle(tiny_model: Path, grammar: Compiler) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    outcome = harness.generate([3, 4], grammar=grammar(guided_regex="a{99}"), max_tokens=3)
    assert outcome.finish_reason is FinishReason.LENGTH
    assert len(outcome.token_ids) == 3 and set(outcome.text) == {"a"}


def test_a_refused_token_ends_its_request_alone(
    tiny_model: Path, grammar: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=200, launch_depth=1))
    alone = harness.generate([9, 10], max_tokens=20)
    accept = GrammarMatcher.accept

    def refuse_the_third(self: GrammarMatcher, token_id: int) -> bool:
        if self.num_accepted == 2:
            self.refusal = "the grammar does not allow the token"
            return False
        return accept(self, token_id)

    monkeypatch.setattr(GrammarMatcher, "accept", refuse_the_third)
    broken = harness.add([3, 4], grammar=grammar(**schema_of(PLACE)), **{**HOT, "n": 3})
    other = harness.add([9, 10], max_tokens=20)
    harness.run()
    error = harness.outcomes[broken, 0].error
    assert error is not None and error.code is ErrorCode.INTERNAL
    assert error.field == "structured_outputs"
    assert harness.outcomes[other, 0].token_ids == alone.token_ids


@pytest.mark.parametrize("depth", [0, 1])
def test_a_dead_end_is_an_error_of_its_request_alone(
    tiny_model: Path, tokenizer: Tokenizer, depth: int
) -> None:
    """No token of the model writes what must come next."""
    assert tokenizer.eos_token_id is not None
    full = Vocabulary.from_tokenizer(
        tokenizer, vocab_size=tokenizer.vocab_size, stop_ids=[tokenizer.eos_token_id]
    )
    assert full is not None
    no_dash = Vocabulary(
        tuple(b"" if b"-" in token else token for token in full.tokens),
        full.vocab_size,
        full.stop_ids,
    )
    harness = Harness(make_engine(tiny_model, num_blocks=200, launch_depth=depth))
    alone = harness.generate([9, 10], max_tokens=20)
    stuck = harness.add(
        [3, 4], grammar=Compiler(no_dash)(guided_regex="[ab]{2}-[ab]"), **{**HOT, "n": 2}
    )
    other = harness.add([9, 10], max_tokens=20)
    harness.run()
    error = harness.outcomes[stuck, 0].error
    assert error is not None and error.code is ErrorCode.INVALID_ARG
    assert "no token of the model" in error.reason
    assert harness.outcomes[other, 0].token_ids == alone.token_ids


def test_a_request_that_forbids_what_its_grammar_needs_is_told(
    tiny_model: Path, grammar: Compiler
) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    outcome = harness.generate(
        [3, 4], grammar=grammar(guided_choice=["ab"]), allowed_token_ids=(5, 6), **HOT
    )
    assert outcome.error is not None and outcome.error.code is ErrorCode.INVALID_ARG


def test_an_aborted_request_frees_everything(tiny_model: Path, grammar: Compiler) -> None:
    harness = Harness(make_engine(tiny_model, num_blocks=200, launch_depth=2))
    compiled = grammar(**schema_of(PLACE))
    for steps in range(6):
        name = harness.add([3, 4, 5], grammar=compiled, **{**HOT, "n": 2})
        for _ in range(steps):
            harness.step()
        harness.engine.abort(name)
        harness.run()


def test_a_model_without_end_tokens_ends_with_its_grammar(
    tiny_model: Path, tokenizer: Tokenizer
) -> None:
    full = Vocabulary.from_tokenizer(tokenizer, vocab_size=tokenizer.vocab_size, stop_ids=[])
    assert full is not None
    harness = Harness(make_engine(tiny_model, num_blocks=200))
    outcome = harness.generate([3, 4], grammar=Compiler(full)(guided_choice=["abc"]), **HOT)
    assert outcome.text == "abc"
    assert (outcome.finish_reason, outcome.stop_reason) == (FinishReason.STOP, COMPLETE)
