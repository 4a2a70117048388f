"""Grammars are compiled within limits, once, and matched token by token."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.text.grammar.walks import allowed_ids, compile_here
from trident_llm.core.errors import ErrorCode, RequestError
from trident_llm.text.grammar import backend as grammar_backend
from trident_llm.text.grammar import compiler as grammar_compiler
from trident_llm.text.grammar import matcher as grammar_matcher
from trident_llm.text.grammar.backend import Backend, Vocabulary
from trident_llm.text.grammar.compiler import GrammarCompiler, GrammarLimits
from trident_llm.text.grammar.matcher import allocate_bitmask
from trident_llm.text.grammar.spec import GrammarSpec, parse_grammar
from trident_llm.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

STOP = 256
WIDTH = 300  # of the logits: wider than the vocabulary, and no multiple of 32
BYTES = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), WIDTH, (STOP,))
# Two readings of every text: the time of a mask grows with each token.
AMBIGUOUS = 'root ::= root root | "a" | ""'


def spec(**values: Any) -> GrammarSpec:
    parsed = parse_grammar({f"guided_{name}": value for name, value in values.items()})
    assert parsed is not None
    return parsed


# Its properties can be left out in very many ways.
def with_many_optional_properties(count: int) -> GrammarSpec:
    """A grammar that takes seconds: there are very many ways to leave properties out."""
    properties = {f"p{n}": {"type": "string"} for n in range(count)}
    schema = {"properties": properties, "additionalProperties": False}
    return spec(json={**schema, "minProperties": 10, "maxProperties": count // 2})


SLOW = with_many_optional_properties(300)
SLOWER = with_many_optional_properties(301)


def regex(index: int) -> GrammarSpec:
    """Many small and different grammars."""
    return spec(regex=f"x{{{index}}}")


def wait_until_gone(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(handle, closefd=True) as file:
        assert select.select([file], [], [], 30)[0], "the process still runs"


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(part) for part in text.split()]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend(BYTES)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    # Processor time is what ends a grammar here, however busy the machine is.
    compiler = GrammarCompiler(
        BYTES, limits=GrammarLimits(seconds=1, real_seconds=300, memory_bytes=4 * 2**30)
    )
    compiler.compile(regex(0))
    yield compiler
    pid = compiler.worker_pid
    compiler.close()
    assert pid is not None
    wait_until_gone(pid)


# Matching


def test_a_matcher_takes_what_the_grammar_allows_and_nothing_else(backend: Backend) -> None:
    matcher = compile_here(backend, spec(choice=["ab", "ac"])).new_matcher()
    assert list(allowed_ids(matcher)) == [ord("a")]
    assert not matcher.accept(ord("b"))
    assert matcher.refusal
    assert matcher.accept(ord("a"))
    assert not matcher.refusal
    assert list(allowed_ids(matcher)) == [ord("b"), ord("c")]
    assert not matcher.is_completed()
    assert not matcher.accept(STOP)
    assert matcher.accept(ord("c"))
    assert matcher.is_completed() and not matcher.is_terminated()
    assert list(allowed_ids(matcher)) == [STOP]
    assert matcher.accept(STOP)
    assert matcher.is_terminated()
    assert not matcher.accept(ord("a"))  # ends that request, hangs nothing
    assert matcher.num_accepted == 3


@pytest.mark.parametrize("token_id", [257, 299, 10**6, -1])
def test_a_token_that_is_none_is_refused(backend: Backend, token_id: int) -> None:
    matcher = compile_here(backend, spec(regex=".*")).new_matcher()
    assert not matcher.accept(token_id)
    assert matcher.accept(ord("a"))


def test_masks_are_written_into_their_rows_alone(backend: Backend) -> None:
    bitmask = allocate_bitmask(3, WIDTH)
    assert bitmask.shape == (3, 10) and bitmask.dtype == np.int32 and (bitmask == -1).all()
    first = compile_here(backend, spec(choice=["a"])).new_matcher()
    last = compile_here(backend, spec(choice=["b"])).new_matcher()
    assert first.fill_mask(bitmask, 0) and last.fill_mask(bitmask, 2)
    bits = np.unpackbits(bitmask.view(np.uint8), axis=1, bitorder="little")
    assert list(np.flatnonzero(bits[0])) == [ord("a")]
    assert bits[1].all()
    assert list(np.flatnonzero(bits[2])) == [ord("b")]


def test_bits_beyond_the_vocabulary_are_never_set(backend: Backend) -> None:
    matcher = compile_here(backend, spec(regex=r"[\s\S]*")).new_matcher()
    bitmask = allocate_bitmask(1, WIDTH)
    assert matcher.fill_mask(bitmask, 0)
    bits = np.unpackbits(bitmask.view(np.uint8)[0], bitorder="little")
    assert not bits[257:].any()


def test_a_dead_end_is_told() -> None:
    no_b = Vocabulary((b"a", b""), 2, (1,))
    matcher = compile_here(Backend(no_b), spec(choice=["ab"])).new_matcher()
    assert matcher.accept(0)
    bitmask = allocate_bitmask(1, 2)
    assert not matcher.fill_mask(bitmask, 0)
    assert matcher.refusal is not None and "no token" in matcher.refusal


def test_a_model_without_stop_tokens_ends_when_the_output_is_complete() -> None:
    bytes_alone = Vocabulary(tuple(bytes([byte]) for byte in range(256)), 256, ())
    matcher = compile_here(Backend(bytes_alone), spec(choice=["ab"])).new_matcher()
    assert matcher.accept(ord("a")) and not matcher.is_terminated()
    assert matcher.accept(ord("b")) and matcher.is_terminated()


def test_a_grammar_that_takes_too_long_for_each_token_ends_its_request(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compile_here(backend, spec(grammar=AMBIGUOUS)).new_matcher()
    bitmask = allocate_bitmask(1, WIDTH)
    assert matcher.fill_mask(bitmask, 0)
    monkeypatch.setattr(grammar_matcher, "ALLOWED_SECONDS", 0.01)
    monkeypatch.setattr(grammar_matcher, "ALLOWED_SECONDS_PER_TOKEN", 0.0001)
    for _ in range(200):
        assert matcher.accept(ord("a"))
        if not matcher.fill_mask(bitmask, 0):
            break
    assert matcher.refusal is not None and "too long" in matcher.refusal
    assert matcher.num_accepted < 150


# JSON that the library alone gets wrong


def accepts(backend: Backend, schema: Any, text: str) -> bool:
    matcher = compile_here(backend, spec(json=schema)).new_matcher()
    return all(map(matcher.accept, text.encode())) and matcher.is_completed()


@pytest.mark.parametrize("schema", [{"maxLength": 9}, {"minLength": 1}, {"pattern": "^.+$"}, {"pattern": "^.+!?$"}])  # fmt: skip
def test_no_string_holds_a_raw_control_character(backend: Backend, schema: Any) -> None:
    assert accepts(backend, {"type": "string", **schema}, '"aé"')
    for char in "\x00\x01\t\n\r\x1f\u2028":
        assert not accepts(backend, {"type": "string", **schema}, f'"a{char}"')


def test_an_additional_property_cannot_spell_a_named_one_in_escapes(backend: Backend) -> None:
    schema = {"type": "object", "properties": {"ab": {"type": "null"}}, "additionalProperties": {}}
    assert accepts(backend, schema, '{"ab":null,"ac":1}')
    assert not accepts(backend, schema, '{"ab":null,"ab":1}')
    assert not accepts(backend, schema, '{"ab":null,"\\u0061b":1}')
    assert not accepts(backend, schema, '{"ab":null,"a\\u0062":1}')


# Vocabularies


def test_control_tokens_are_out_of_reach_and_others_are_their_bytes(
    byte_level_folder: Path, wordpiece_folder: Path
) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    stop = tokenizer.token_id("<|im_end|>")
    assert stop is not None
    vocabulary = Vocabulary.from_tokenizer(
        tokenizer, vocab_size=tokenizer.vocab_size + 5, stop_ids=[stop, stop, 10**6]
    )
    assert vocabulary is not None
    assert vocabulary.stop_ids == (stop,)
    assert len(vocabulary.tokens) == tokenizer.vocab_size
    assert all(vocabulary.tokens[id_] == b"" for id_ in tokenizer.special_ids)
    think = tokenizer.token_id("<think>")
    assert think is not None and vocabulary.tokens[think] == b"<think>"
    wordpiece = Tokenizer.from_folder(wordpiece_folder)
    assert Vocabulary.from_tokenizer(wordpiece, vocab_size=11, stop_ids=[2]) is None


def test_a_head_narrower_than_the_tokenizer_bounds_the_vocabulary(byte_level_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size=100, stop_ids=[0])
    assert vocabulary is not None and len(vocabulary.tokens) == vocabulary.vocab_size == 100


# Compiling


def test_compiled_grammars_are_kept(compiler: GrammarCompiler) -> None:
    first = compiler.compile(spec(json={"type": "null"}))
    assert compiler.compile(spec(json={"type": "null", "title": "x"})) is first
    assert first.new_matcher().accept(ord("n"))
    assert compiler.cached_bytes >= first.num_bytes > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (spec(grammar='foo ::= "a"'), "root"),
        (spec(grammar="root ::= bar"), "not defined"),
        (spec(grammar='root ::= "'), "line 1"),
    ],
)
def test_what_the_library_refuses_is_the_callers_mistake(
    compiler: GrammarCompiler, wrong: GrammarSpec, says: str
) -> None:
    for _ in range(2):  # also when it is asked again
        with pytest.raises(RequestError, match=says) as caught:
            compiler.compile(wrong, field="sampling_parameters.guided_grammar")
        assert caught.value.code is ErrorCode.INVALID_ARG
        assert caught.value.field == "sampling_parameters.guided_grammar"
        assert ".cc" not in str(caught.value) and "bar" not in str(caught.value)


def test_a_grammar_that_compiles_slowly_is_refused_and_its_process_is_gone(
    compiler: GrammarCompiler,
) -> None:
    pid = compiler.worker_pid
    assert pid is not None
    with pytest.raises(RequestError, match="takes more than 1 s") as caught:
        compiler.compile(SLOW)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert compiler.worker_pid == pid  # no start anew for the next one
    assert children_of(pid) == []
    assert compiler.compile(regex(1))


def test_real_time_is_bounded_too(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(compiler._limits, seconds=60, real_seconds=0.2)
    monkeypatch.setattr(compiler._worker, "_limits", limits)
    assert compiler._worker is not None
    assert compiler._worker.try_grammar(SLOW)["kind"] == "slow"
    assert children_of(compiler._worker.pid) == []


@pytest.mark.parametrize("slow", [AMBIGUOUS, 'root ::= ("a"{0,1000}){0,1000}'])
def test_a_grammar_with_slow_tokens_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    # With few tokens in the vocabulary little is slow.
    monkeypatch.setattr(compiler, "_limits", replace(compiler._limits, token_seconds=0.0005))
    with pytest.raises(RequestError, match="too long for each token"):
        compiler.compile(spec(grammar=slow))
    assert compiler.compile(spec(json={"type": "array", "items": {}}))


@pytest.mark.parametrize("pattern", ["[ab]*a[ab]{13}", "([ab]*a[ab]{30}){1,50}", "(a|aa|aaa)*b"])
def test_patterns_that_explode_as_automata_are_bounded(
    compiler: GrammarCompiler, pattern: str
) -> None:
    grammar = compiler.compile(spec(regex=pattern))
    assert grammar.num_bytes < 2**20 and grammar.seconds < 1


def test_memory_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler._worker, "_limits", replace(compiler._limits, memory_bytes=1 << 20)
    )
    large = spec(json={"enum": [f"{n:030}" for n in range(1500)]})
    with pytest.raises(RequestError, match=r"memory|cannot be compiled") as caught:
        compiler.compile(large)
    assert caught.value.code is ErrorCode.INVALID_ARG
    monkeypatch.undo()
    assert compiler.compile(regex(2))


def test_equal_requests_at_once_compile_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[GrammarSpec] = []
    worker = compiler._worker
    assert worker is not None
    really_try = worker.try_grammar

    def count(spec: GrammarSpec) -> dict[str, Any]:
        tried.append(spec)
        return really_try(spec)

    monkeypatch.setattr(worker, "try_grammar", count)
    found: list[Any] = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(compiler.compile(spec(json={"type": "array", "items": {"type": "integer"}})))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert len(tried) == 1


def test_a_refusal_reaches_everyone_who_waits(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    worker = compiler._worker
    assert worker is not None

    def refuse(spec: GrammarSpec) -> dict[str, Any]:
        release.wait(30)
        return {"ok": False, "kind": "slow", "reason": ""}

    monkeypatch.setattr(worker, "try_grammar", refuse)
    fields: list[str] = []

    def ask(field: str) -> None:
        with pytest.raises(RequestError) as caught:
            compiler.compile(regex(777), field=field)
        fields.append(caught.value.field)

    threads = [threading.Thread(target=ask, args=(f"f{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(fields) == ["f0", "f1", "f2", "f3"]


def test_the_cache_is_bounded_in_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler._kept.clear()
    compiler._kept_bytes = 0
    first = compiler.compile(regex(10))
    room = compiler.cached_bytes + 3 * first.num_bytes
    assert compiler.compile(regex(11))
    monkeypatch.setattr(compiler, "_limits", replace(compiler._limits, cache_bytes=room))
    for index in range(12, 20):
        compiler.compile(regex(10))  # used again and again, so it stays
        compiler.compile(regex(index))
        assert compiler.cached_bytes <= room
    assert compiler.compile(regex(10)) is first
    assert regex(11) not in compiler._kept
    monkeypatch.setattr(compiler, "_limits", replace(compiler._limits, cache_bytes=0))
    assert compiler.compile(regex(40)).new_matcher().accept(ord("x"))  # too large: served, not kept
    assert regex(40) not in compiler._kept


def test_refused_grammars_are_remembered_within_bounds(compiler: GrammarCompiler) -> None:
    for index in range(grammar_compiler._MAX_REFUSED + 5):
        with pytest.raises(RequestError):
            compiler.compile(spec(grammar=f"root ::= missing{index}"))
    assert len(compiler._refused) == grammar_compiler._MAX_REFUSED


def test_a_worker_that_dies_is_replaced(compiler: GrammarCompiler) -> None:
    pid = compiler.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    assert compiler.compile(regex(50))
    assert compiler.worker_pid not in (None, pid)


def test_a_worker_that_dies_while_it_works_is_an_error_of_ours(compiler: GrammarCompiler) -> None:
    worker = compiler._worker
    assert worker is not None
    worker._limits = replace(worker._limits, seconds=60)
    errors: list[RequestError] = []

    def ask() -> None:
        with pytest.raises(RequestError) as caught:
            compiler.compile(SLOWER)
        errors.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    while not (children := children_of(worker.pid)):
        assert thread.is_alive()
    os.kill(worker.pid, signal.SIGKILL)
    thread.join(30)
    assert [error.code for error in errors] == [ErrorCode.INTERNAL]
    for gone in (worker.pid, *children):
        wait_until_gone(gone)
    assert SLOWER not in compiler._refused  # it was not the grammar's fault
    assert compiler.compile(regex(51))


def test_closing_ends_the_worker_also_in_the_middle_of_work() -> None:
    compiler = GrammarCompiler(BYTES, limits=GrammarLimits(seconds=60, real_seconds=60))
    compiler.compile(regex(0))
    pid = compiler.worker_pid
    assert pid is not None
    errors: list[RequestError] = []

    def ask() -> None:
        with pytest.raises(RequestError) as caught:
            compiler.compile(SLOW)
        errors.append(caught.value)

    thread = threading.Thread(target=ask)
    thread.start()
    while not (children := children_of(pid)):
        assert thread.is_alive()
    compiler.close()
    thread.join(30)
    assert [error.code for error in errors] == [ErrorCode.UNAVAILABLE]
    for gone in (pid, *children):
        wait_until_gone(gone)
    with pytest.raises(RequestError) as caught:
        compiler.compile(regex(1))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    compiler.close()  # a second time is fine


def test_the_worker_ends_with_the_process_that_started_it() -> None:
    program = (
        "import os, sys, threading, time\n"
        "from tests.text.grammar.test_compiler import BYTES, SLOW, children_of, regex\n"
        "from trident_llm.text.grammar.compiler import GrammarCompiler, GrammarLimits\n"
        "compiler = GrammarCompiler(BYTES, limits=GrammarLimits(seconds=60, real_seconds=60))\n"
        "compiler.compile(regex(0))\n"
        "threading.Thread(target=compiler.compile, args=(SLOW,), daemon=True).start()\n"
        "while not (children := children_of(compiler.worker_pid)):\n"
        "    pass\n"
        "print(compiler.worker_pid, *children, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=root,
    ) as process:
        assert process.stdout is not None
        pids = [int(part) for part in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    for pid in pids:
        wait_until_gone(pid)


def test_an_interpreter_that_does_not_work_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trident"), "propagate", True)
    for path, reason in (
        (Path("/nowhere/python3"), "/nowhere/python3 does not run"),
        (Path("/bin/false"), "process"),
    ):
        caplog.clear()
        compiler = GrammarCompiler(BYTES, interpreter=path)
        with pytest.raises(RequestError) as caught:
            compiler.compile(regex(1))
        assert caught.value.code is ErrorCode.INTERNAL
        assert reason in caplog.text
        compiler.close()


def test_without_the_library_requests_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_backend, "is_installed", lambda: False)
    monkeypatch.setattr(grammar_compiler, "is_installed", lambda: False)
    compiler = GrammarCompiler(BYTES)
    with pytest.raises(RequestError, match="xgrammar") as caught:
        compiler.compile(regex(1))
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert compiler.worker_pid is None


def test_a_tokenizer_without_bytes_is_refused_by_name() -> None:
    compiler = GrammarCompiler(None)
    with pytest.raises(RequestError, match="tokenizer") as caught:
        compiler.compile(regex(1))
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_asking_for_a_grammar_loads_no_heavy_library() -> None:
    program = (
        "import sys\n"
        "from trident_llm.text.grammar import compiler, spec, worker\n"
        "compiler.GrammarCompiler(None)\n"
        "heavy = {'torch', 'transformers', 'xgrammar', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Bytes that are no UTF-8


@pytest.mark.parametrize(
    "values",
    [
        {"json": {"type": "string", "maxLength": 6}},
        {"json": {"type": "string"}},
        {"json": {"type": "string", "pattern": "^[^a]{2}$"}},
        {"json": {"type": "string", "pattern": "^[\u0100-\uffff]{2}$"}},
        {"regex": "[^a]"},
        {"regex": r"[\u0100-\uffff]"},
        {"regex": "."},
        {"regex": "[^]"},
        {"grammar": "root ::= [^a]"},
        {"grammar": r"root ::= [\u0100-\U0010ffff]"},
    ],
)
def test_no_output_holds_broken_utf8(backend: Backend, values: dict[str, Any]) -> None:
    """Surrogates and overlong forms begin with two bytes that no character begins with."""
    grammar = compile_here(backend, spec(**values))
    start = b'"' if "json" in values else b""

    def following(prefix: bytes) -> list[int]:
        matcher = grammar.new_matcher()
        assert all(map(matcher.accept, prefix))
        return [int(id_) for id_ in allowed_ids(matcher) if id_ < STOP]

    leads = [byte for byte in following(start) if byte >= 0x80]
    assert leads
    for lead in leads:
        for second in following(start + bytes([lead])):
            rest = 0 if lead < 0xE0 else 1 if lead < 0xF0 else 2
            bytes([lead, second, *[0x80] * rest]).decode()


def test_no_escape_is_half_a_character(backend: Backend) -> None:
    assert accepts(backend, {"type": "string"}, r'"\u0041\ue123\ud7ff"')
    assert not accepts(backend, {"type": "string"}, r'"\ud800"')


def test_names_keep_their_characters_when_a_digit_follows(backend: Backend) -> None:
    schema = {"type": "object", "properties": {"größe": {}, "a\u00adc1": {}}, "required": ["größe"]}
    assert accepts(backend, schema, '{"größe":1}')
    assert not accepts(backend, schema, '{"gr\u00f6\u0dfe":1}')
