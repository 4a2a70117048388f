"""The door's threads: a grammar that takes long to compile holds up nobody else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.text.tokenizer_builders import BYTE_LEVEL_CONFIG, make_byte_level
from trident_llm.core.errors import ErrorCode, RequestError, invalid
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import SamplingParams
from trident_llm.serving.intake import Intake, ModelFacts
from trident_llm.serving.protocol import RawRequest
from trident_llm.serving.responder import RequestHandle
from trident_llm.text.grammar.spec import GrammarSpec, parse_grammar
from trident_llm.text.tokenizer import Tokenizer


class Loop:
    """The engine and its loop: keeps what the engine would get."""

    def __init__(self) -> None:
        self.added: dict[str, Any] = {}
        self.news = threading.Condition()

    def put(self, request: Request, arrival: float, grammar: Any) -> None:
        with self.news:
            self.added[request.request_id] = grammar
            self.news.notify_all()

    def add(self, request_id: str, put: Callable[[Any], None]) -> None:
        put(SimpleNamespace(add=self.put))

    def abort(self, request_id: str, error: RequestError) -> None:
        raise AssertionError("nothing was cancelled after it was handed over")

    def wait_for(self, request_id: str) -> Any:
        with self.news:
            assert self.news.wait_for(lambda: request_id in self.added, 60)
        return self.added[request_id]


class Responder:
    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.news = threading.Condition()

    def answer(self, handle: RequestHandle, answer: Any) -> None:
        with self.news:
            self.answers[handle.request_id] = answer
            self.news.notify_all()

    def wait_for(self, request_id: str) -> Any:
        with self.news:
            assert self.news.wait_for(lambda: request_id in self.answers, 60)
        return self.answers[request_id]


class Compiler:
    """Compiles when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.began = threading.Semaphore(0)
        self.known: set[GrammarSpec] = set()
        self.asked: list[str] = []

    def is_settled(self, spec: GrammarSpec) -> bool:
        return spec in self.known

    def compile(self, spec: GrammarSpec, *, field: str) -> str:
        if spec not in self.known:
            self.asked.append(spec.text)
            self.began.release()
            assert self.go_on.wait(60)
        if "bad" in spec.text:
            raise invalid(field, "cannot be compiled")
        self.known.add(spec)
        return f"compiled {spec.text}"


class Door:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.loop, self.responder, self.compiler = Loop(), Responder(), Compiler()
        self.counting, self.go_on = threading.Semaphore(0), threading.Event()
        facts = ModelFacts(
            tokenizer, None, 200, 8, 20, 16, 400, tokenizer.vocab_size, SamplingParams()
        )
        self.intake = Intake(
            facts,
            self.loop,  # type: ignore[arg-type]
            self.responder,  # type: ignore[arg-type]
            stats=self._stats,
            grammars=self.compiler,  # type: ignore[arg-type]
        )
        self.intake.start()

    def _stats(self, detailed: bool) -> dict[str, Any]:
        self.counting.release()
        assert self.go_on.wait(30)
        return {"detailed": detailed}

    def control(self, name: str, **operation: Any) -> RequestHandle:
        handle = RequestHandle(name, None)
        tensors = {"control": np.array([json.dumps(operation).encode()], np.object_)}
        self.intake.put(handle, RawRequest(tensors, ""))
        return handle

    def send(self, name: str, **sampling: Any) -> RequestHandle:
        handle = RequestHandle(name, None)
        tensors = {
            "text_input": np.array([b"hello"], np.object_),
            "sampling_parameters": np.array([json.dumps(sampling).encode()], np.object_),
        }
        self.intake.put(handle, RawRequest(tensors, ""))
        return handle


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    make_byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(BYTE_LEVEL_CONFIG))
    door = Door(Tokenizer.from_folder(tmp_path))
    yield door
    door.compiler.go_on.set()
    door.go_on.set()
    door.intake.stop()
    assert door.intake.num_waiting == 0


def test_others_pass_while_a_grammar_compiles(door: Door) -> None:
    door.compiler.known.add(spec_of("known"))
    for number in range(5):  # more than there are threads
        door.send(f"slow {number}", guided_regex=f"slow{number}")
    assert door.compiler.began.acquire(timeout=60)
    door.send("plain")
    door.send("known", guided_regex="known")
    assert door.loop.wait_for("plain") is None
    assert door.loop.wait_for("known") == "compiled known"
    assert not any(name.startswith("slow") for name in door.loop.added)
    assert door.intake.num_waiting == 5
    door.compiler.go_on.set()
    for number in range(5):
        assert door.loop.wait_for(f"slow {number}") == f"compiled slow{number}"


def test_a_grammar_that_fails_is_answered_under_its_parameter(door: Door) -> None:
    door.compiler.go_on.set()
    door.send("bad", guided_choice=["bad"])
    error = door.responder.wait_for("bad")
    assert (error.code, error.field) == (
        ErrorCode.INVALID_ARG,
        "sampling_parameters.guided_choice",
    )
    assert "bad" not in door.loop.added


def test_nothing_is_compiled_for_a_client_that_left(door: Door) -> None:
    door.send("first", guided_regex="first")
    assert door.compiler.began.acquire(timeout=60)
    second = door.send("second", guided_regex="second")
    door.send("after it", guided_regex="third")
    gone = RequestError(ErrorCode.CANCELLED, "request", "cancelled by the client")
    second.abort_error = gone
    door.compiler.go_on.set()
    assert door.responder.wait_for("second") is gone
    door.loop.wait_for("after it")
    assert door.compiler.asked == ["first", "third"]


def test_a_schema_that_is_wrong_never_reaches_the_compiler(door: Door) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": 5}}}
    door.send("wrong", structured_outputs={"json": schema})
    error = door.responder.wait_for("wrong")
    assert error.code is ErrorCode.INVALID_ARG
    assert error.field == "sampling_parameters.structured_outputs.json"
    assert "#/properties/a/items" in error.reason
    assert door.compiler.asked == []


def test_prompts_and_bad_words_pass_the_door_as_the_request_asks(door: Door) -> None:
    handle = door.send("short", truncate_prompt_tokens=1, bad_words=["world"])
    door.loop.wait_for("short")
    assert handle.params is not None
    assert handle.params.bad_words_token_ids
    long = door.send("long", truncate_prompt_tokens=1, max_tokens=199)
    door.loop.wait_for("long")  # with its whole prompt it would not fit
    assert long.params is not None and long.params.max_tokens == 199


def test_looking_at_the_queue_makes_it_no_longer(door: Door) -> None:
    door.control("look", op="stats", detail=True)
    assert door.counting.acquire(timeout=30)
    assert door.intake.num_waiting == 0  # though the operation waits for the engine
    door.go_on.set()
    answer = json.loads(door.responder.wait_for("look")["control_output"][0])
    assert answer == {"detailed": True}
    door.control("wrong", op="stats", detail="yes")
    assert str(door.responder.wait_for("wrong")).startswith("INVALID_ARG control.detail: ")


def test_a_token_that_is_part_of_a_character_is_told_by_its_bytes(door: Door) -> None:
    euro = door.intake._facts.tokenizer.encode("€", add_special_tokens=False)
    parts = [door.intake._token_text(token_id) for token_id in euro]
    assert len(parts) > 1
    assert b"".join(part.data or b"" for part in parts) == "€".encode()
    (whole,) = door.intake._facts.tokenizer.encode("a", add_special_tokens=False)
    assert door.intake._token_text(whole) == ("a", None)


def spec_of(pattern: str) -> GrammarSpec:
    spec = parse_grammar({"guided_regex": pattern})
    assert spec is not None
    return spec
