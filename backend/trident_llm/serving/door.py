"""The door: threads that take requests in, whatever kind of model they are for.

A request leaves this room once: into the engine's inbox, or answered through the responder. Nothing
here runs on the engine's thread.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from trident_llm.core.errors import ErrorCode, RequestError, invalid
from trident_llm.serving.protocol import RawRequest
from trident_llm.serving.responder import RequestHandle, Responder, Tensors
from trident_llm.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger("trident")

NUM_READERS = 2
_UNEXPECTED = RequestError(ErrorCode.INTERNAL, "request", "could not be read; this is our fault")

Tasks = queue.SimpleQueue[tuple[RequestHandle, Callable[[], None]] | None]


class TextFacts(Protocol):
    """What the checks at the door need of every model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class Door:
    """A queue of raw requests and the threads that read them.

    Args:
        stats: the snapshot that the ``stats`` control operation answers with, detailed or not.
    """

    least_chars_per_token = 1  # that a token can stand for, whatever the vocabulary says

    def __init__(
        self, texts: TextFacts, responder: Responder, stats: Callable[[bool], dict[str, Any]]
    ) -> None:
        self._texts = texts
        self._responder = responder
        self._stats = stats
        self._unread: Tasks = queue.SimpleQueue()
        self._num_waiting = 0
        self._num_answering = 0  # control operations under way: of those, but nothing waits in them
        self._lock = threading.Lock()
        self._readers = [self._thread(self._unread, str(i)) for i in range(NUM_READERS)]

    def start(self) -> None:
        for thread in self._readers:
            thread.start()

    def stop(self) -> None:
        """Joins the threads, once what is queued is worked off."""
        for _ in self._readers:
            self._unread.put(None)
        for thread in self._readers:
            thread.join()

    def put(self, handle: RequestHandle, raw: RawRequest) -> None:
        self._put(self._unread, handle, lambda: self._take_in(handle, raw))

    @property
    def num_waiting(self) -> int:
        """Requests for the engine that have not been handed on yet."""
        return self._num_waiting - self._num_answering

    def _take_in(self, handle: RequestHandle, raw: RawRequest) -> None:
        """Reads a request and hands it over, or answers it; raises what is wrong with it."""
        raise NotImplementedError

    def _thread(self, tasks: Tasks, name: str) -> threading.Thread:
        return threading.Thread(
            target=self._run, args=(tasks,), name=f"trident-intake-{name}", daemon=True
        )

    def _put(self, tasks: Tasks, handle: RequestHandle, task: Callable[[], None]) -> None:
        with self._lock:
            self._num_waiting += 1
        tasks.put((handle, task))

    def _run(self, tasks: Tasks) -> None:
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

    # ---- texts and ids ----------------------------------------------------------------------------

    def _encode_text(self, text: str, field: str = "text_input") -> list[int]:
        self._check_length(field, len(text))
        try:
            return self._texts.tokenizer.encode(text)
        except TokenizerError as error:
            raise invalid(field, str(error)) from None

    def _check_length(self, field: str, num_chars: int) -> None:
        """Refuses before encoding what cannot fit, since encoding megabytes takes seconds."""
        if num_chars > self._max_chars:
            raise invalid(field, f"is too long: it must have at most {self._max_chars} characters")

    @property
    def _max_chars(self) -> int:
        """Characters that a text of the greatest length can have, in tokens."""
        longest = max(self._texts.tokenizer.max_chars_per_token, self.least_chars_per_token)
        return self._texts.max_model_len * longest

    def _check_ids(self, field: str, ids: list[int]) -> None:
        """At least one id, all in the vocabulary."""
        if any(not 0 <= token_id < self._texts.vocab_size for token_id in ids):
            raise invalid(field, f"must hold ids from 0 to {self._texts.vocab_size - 1}")
        if not ids:
            raise invalid(field, "is empty: at least one token is needed")

    # ---- control ----------------------------------------------------------------------------------

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
            ids = self._texts.tokenizer.encode(text, add_special_tokens=special)
        except TokenizerError as error:
            raise invalid("control.text", str(error)) from None
        return {"token_ids": ids, "max_model_len": self._texts.max_model_len}

    def _detokenize(self, control: Mapping[str, Any]) -> dict[str, Any]:
        ids, texts = control.get("token_ids"), self._texts
        if not isinstance(ids, list) or any(type(item) is not int for item in ids):
            raise invalid("control.token_ids", "must be a list of token ids")
        if len(ids) > texts.max_model_len:
            raise invalid("control.token_ids", f"must hold at most {texts.max_model_len} ids")
        if any(not 0 <= item < texts.vocab_size for item in ids):
            raise invalid("control.token_ids", f"must hold ids from 0 to {texts.vocab_size - 1}")
        return {"text": texts.tokenizer.decode(ids, skip_special_tokens=False)}
