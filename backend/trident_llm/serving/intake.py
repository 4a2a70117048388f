"""The door of a model that generates: requests are parsed, rendered, tokenized, checked, handed over.

Nothing invalid passes. See :mod:`trident_llm.serving.door`.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trident_llm.core.errors import invalid
from trident_llm.core.request import Request
from trident_llm.core.sampling_params import (
    SamplingParams,
    check_against_model,
    tokenize_bad_words,
    truncate_prompt,
)
from trident_llm.engine.engine import Engine
from trident_llm.engine.loop import EngineLoop
from trident_llm.serving.door import Door, Tasks
from trident_llm.serving.protocol import (
    ParsedRequest,
    RawRequest,
    ResponseBuilder,
    TokenText,
    check_prompt_logprobs,
    parse_request,
)
from trident_llm.serving.responder import RequestHandle, Responder
from trident_llm.text.chat import ChatTemplate
from trident_llm.text.grammar.compiler import GrammarCompiler
from trident_llm.text.grammar.spec import GrammarSpec
from trident_llm.text.messages import ChatTemplateError
from trident_llm.text.tokenizer import Tokenizer, TokenizerError


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


class Intake(Door):
    """The door of a model that generates.

    Args:
        stats: the snapshot that the ``stats`` control operation answers with, detailed or not.
        grammars: compiles what structured outputs follow. It may take seconds, so requests that
            need it wait on a thread of their own, and others never behind them.
        seed: makes the seeds given to requests without one repeatable; None draws them at random.
    """

    def __init__(
        self,
        facts: ModelFacts,
        loop: EngineLoop[Engine],
        responder: Responder,
        *,
        stats: Callable[[bool], dict[str, Any]],
        grammars: GrammarCompiler,
        seed: int | None = None,
    ) -> None:
        super().__init__(facts, responder, stats)
        self._facts = facts
        self._loop = loop
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._grammars = grammars
        self._uncompiled: Tasks = queue.SimpleQueue()
        self._compiling = self._thread(self._uncompiled, "grammar")

    def start(self) -> None:
        super().start()
        self._compiling.start()

    def stop(self) -> None:
        super().stop()
        self._uncompiled.put(None)  # after the last one that a reader put there
        self._compiling.join()

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
        self._loop.add(
            request.request_id, lambda engine: engine.add(request, handle.arrival, grammar)
        )
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
        self._check_ids(field, ids)
        return ids

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
