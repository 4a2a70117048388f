"""The door: threads that parse, render, tokenize and check requests, then hand them to the engine.

Nothing invalid passes, and nothing here runs on the engine's thread. A request leaves this room once:
into the engine's inbox, or answered through the responder.
"""

from __future__ import annotations

import json
import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trident_llm.core.errors import ErrorCode, RequestError, invalid
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import (
    SamplingParams,
    check_against_model,
    tokenize_bad_words,
    truncate_prompt,
)
from trident_llm.engine.loop import EngineLoop
from trident_llm.serving.protocol import (
    ParsedRequest,
    RawRequest,
    ResponseBuilder,
    TokenText,
    check_prompt_logprobs,
    parse_request,
)
from trident_llm.serving.responder import RequestHandle, Responder, Tensors
from trident_llm.text.chat import ChatTemplate
from trident_llm.text.grammar.compiler import GrammarCompiler
from trident_llm.text.grammar.spec import GrammarSpec
from trident_llm.text.messages import ChatTemplateError
from trident_llm.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger("trident")

NUM_THREADS = 2  # that read requests; another one compiles grammars
_UNEXPECTED = RequestError(ErrorCode.INTERNAL, "request", "could not be read; this is our fault")


_Tasks = queue.SimpleQueue[tuple[RequestHandle, Callable[[], None]] | None]


@dataclass(frozen=True)
class ModelFacts:
    """What the checks at the door need of the loaded model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    block_size: int
    num_blocks: int
    vocab_size: int
    defaults: SamplingParams


class Intake:
    """A queue of raw requests and the threads that work it off.

    Args:
        stats: the snapshot that the ``stats`` control operation answers with, detailed or not.
        grammars: compiles what structured outputs follow. It may take seconds, so requests that
            need it wait on a thread of their own, and others never behind them.
        seed: makes the seeds given to requests without one repeatable; None draws them at random.
    """

    def __init__(
        self,
        facts: ModelFacts,
        loop: EngineLoop,
        responder: Responder,
        *,
        stats: Callable[[bool], dict[str, Any]],
        grammars: GrammarCompiler,
        seed: int | None = None,
    ) -> None:
        self._facts = facts
        self._loop = loop
        self._responder = responder
        self._stats = stats
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._grammars = grammars
        self._unread: _Tasks = queue.SimpleQueue()
        self._uncompiled: _Tasks = queue.SimpleQueue()
        self._num_waiting = 0
        self._num_answering = 0  # control operations under way: of those, but nothing waits in them
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=args, name=f"trident-intake-{i}", daemon=True)
            for i, args in enumerate([(self._unread,)] * NUM_THREADS + [(self._uncompiled,)])
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Joins the threads, once what is queued is worked off."""
        *readers, compiling = self._threads
        for _ in readers:
            self._unread.put(None)
        for thread in readers:
            thread.join()
        self._uncompiled.put(None)  # after the last one that a reader put there
        compiling.join()

    def put(self, handle: RequestHandle, raw: RawRequest) -> None:
        self._put(self._unread, handle, lambda: self._take_in(handle, raw))

    def _put(self, tasks: _Tasks, handle: RequestHandle, task: Callable[[], None]) -> None:
        with self._lock:
            self._num_waiting += 1
        tasks.put((handle, task))

    @property
    def num_waiting(self) -> int:
        """Requests for the engine that have not been handed on yet."""
        return self._num_waiting - self._num_answering

    def _run(self, tasks: _Tasks) -> None:
        while True:
            item = tasks.get()
            if item is None:
                return
            handle, task = item
            try:
                if handle.abort_error is not None:  # its client left while it lay here
                    raise handle.abort_error
                task()
            except RequestError as error:
                self._responder.answer(handle, error)
            except Exception:
                logger.exception("%s could not be taken in", handle.label)
                self._responder.answer(handle, _UNEXPECTED)
            with self._lock:
                self._num_waiting -= 1

    def _take_in(self, handle: RequestHandle, raw: RawRequest) -> None:
        parsed = parse_request(raw, self._facts.defaults)
        if parsed.control is not None:
            self._answer(handle, parsed.control)
            return
        facts = self._facts
        prompt_ids = truncate_prompt(self._encode(parsed), parsed.params, facts.max_model_len)
        check_prompt_logprobs(parsed, len(prompt_ids))
        params = check_against_model(
            tokenize_bad_words(
                parsed.params, lambda word: facts.tokenizer.encode(word, add_special_tokens=False)
            ),
            num_prompt_tokens=len(prompt_ids),
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            max_num_seqs=facts.max_num_seqs,
            max_logprobs=facts.max_logprobs,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            prompt_field=parsed.prompt_field,
        )
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        handle.builder = ResponseBuilder(parsed, self._token_text)
        handle.stream = parsed.stream
        handle.params = params
        request = Request(handle.request_id, prompt_ids, params, cache_salt=parsed.cache_salt)
        spec = parsed.grammar
        if spec is None or self._grammars.is_settled(spec):
            self._hand_over(handle, request, spec)
        else:
            self._put(self._uncompiled, handle, lambda: self._hand_over(handle, request, spec))

    def _hand_over(self, handle: RequestHandle, request: Request, spec: GrammarSpec | None) -> None:
        grammar = None
        if spec is not None:
            grammar = self._grammars.compile(spec, field=spec.error_field)
        self._loop.add(request, handle.arrival, grammar)
        if handle.abort_error is not None:
            # A cancel may have been seen before the engine knew the request.
            self._loop.abort(handle.request_id, handle.abort_error)

    def _token_text(self, token_id: int) -> TokenText:
        tokenizer = self._facts.tokenizer
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        in_part = "\N{REPLACEMENT CHARACTER}" in text and tokenizer.byte_rules is not None
        return TokenText(text, tokenizer.token_bytes(token_id) if in_part else None)

    def _encode(self, parsed: ParsedRequest) -> list[int]:
        """The prompt's token ids, at least one, all in the vocabulary."""
        field = parsed.prompt_field
        if parsed.chat is not None:
            ids = self._encode_chat(parsed.chat)
        elif parsed.prompt_text is not None:
            ids = self._encode_text(parsed.prompt_text)
        else:
            assert parsed.prompt_ids is not None
            ids = parsed.prompt_ids
            if any(not 0 <= token_id < self._facts.vocab_size for token_id in ids):
                raise invalid(field, f"must hold ids from 0 to {self._facts.vocab_size - 1}")
        if not ids:
            raise invalid(field, "is empty: at least one token is needed")
        return ids

    def _check_length(self, field: str, num_chars: int) -> None:
        """Refuses before encoding what cannot fit, since encoding megabytes takes seconds."""
        most = self._facts.max_model_len * self._facts.tokenizer.max_chars_per_token
        if num_chars > most:
            raise invalid(field, f"is too long: it must have at most {most} characters")

    def _encode_text(self, text: str) -> list[int]:
        self._check_length("text_input", len(text))
        try:
            return self._facts.tokenizer.encode(text)
        except TokenizerError as error:
            raise invalid("text_input", str(error)) from None

    def _encode_chat(self, chat: Any) -> list[int]:
        template = self._facts.chat_template
        if template is None:
            raise invalid(
                "chat", "cannot be used: this model has no chat template; send text_input"
            )
        tools = None if chat.get("tool_choice") == "none" else chat.get("tools")
        continues = chat.get("continue_final_message", False)
        try:
            return template.encode(
                self._facts.tokenizer,
                chat["messages"],
                tools=tools,
                add_generation_prompt=chat.get("add_generation_prompt", not continues),
                continue_final_message=continues,
                template_kwargs=chat.get("chat_template_kwargs"),
                max_chars=self._facts.max_model_len * self._facts.tokenizer.max_chars_per_token,
            )
        except (ChatTemplateError, TokenizerError) as error:
            raise invalid("chat", str(error)) from None

    def _answer(self, handle: RequestHandle, control: Mapping[str, Any]) -> None:
        """A snapshot waits for the end of a step; the queue must not look longer for being looked at."""
        with self._lock:
            self._num_answering += 1
        try:
            self._responder.answer(handle, self._control(control))
        finally:
            with self._lock:
                self._num_answering -= 1

    def _control(self, control: Mapping[str, Any]) -> Tensors:
        """The answer to a ``control`` input."""
        operation = control.get("op")
        if operation == "tokenize":
            answer = self._tokenize(control)
        elif operation == "detokenize":
            answer = self._detokenize(control)
        elif operation == "stats":
            detailed = control.get("detail", False)
            if not isinstance(detailed, bool):
                raise invalid("control.detail", "must be true or false")
            answer = self._stats(detailed)
        else:
            raise invalid("control.op", "must be tokenize, detokenize or stats")
        text = json.dumps(answer, ensure_ascii=False).encode()
        return {"control_output": np.array([text], dtype=np.object_)}

    def _tokenize(self, control: Mapping[str, Any]) -> dict[str, Any]:
        text, special = control.get("text"), control.get("add_special_tokens", True)
        if not isinstance(text, str):
            raise invalid("control.text", "must be a string")
        if not isinstance(special, bool):
            raise invalid("control.add_special_tokens", "must be true or false")
        self._check_length("control.text", len(text))
        try:
            ids = self._facts.tokenizer.encode(text, add_special_tokens=special)
        except TokenizerError as error:
            raise invalid("control.text", str(error)) from None
        return {"token_ids": ids, "max_model_len": self._facts.max_model_len}

    def _detokenize(self, control: Mapping[str, Any]) -> dict[str, Any]:
        ids, facts = control.get("token_ids"), self._facts
        if not isinstance(ids, list) or any(type(item) is not int for item in ids):
            raise invalid("control.token_ids", "must be a list of token ids")
        if len(ids) > facts.max_model_len:
            raise invalid("control.token_ids", f"must hold at most {facts.max_model_len} ids")
        if any(not 0 <= item < facts.vocab_size for item in ids):
            raise invalid("control.token_ids", f"must hold ids from 0 to {facts.vocab_size - 1}")
        return {"text": facts.tokenizer.decode(ids, skip_special_tokens=False)}
