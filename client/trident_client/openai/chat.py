"""``POST /v1/chat/completions``: a conversation, answered."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trident_client import Delta, Result, TridentError
from trident_client.openai.chat_request import ChatRequest
from trident_client.openai.errors import ApiError
from trident_client.openai.fields import StreamOptions, parse_body
from trident_client.openai.gateway import Gateway, Job
from trident_client.openai.http import read_json
from trident_client.openai.output.parser import OutputForm, OutputParser
from trident_client.openai.output.pieces import Arguments, CallStart, Piece, Reasoning, Text, joined
from trident_client.openai.prompt_scores import listed
from trident_client.openai.reasoning_tokens import reasoning_tokens
from trident_client.openai.sse import event
from trident_client.openai.usage import chat_logprobs, finish_reason, usage

__all__ = ["chat_completions", "new_call_id", "parse_output"]

_LETTERS = string.ascii_letters + string.digits


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """The endpoint."""
    body = parse_body(ChatRequest, await read_json(request))
    body.check()
    use = body.tool_use(gateway.settings)
    job = gateway.job(request, body, "chatcmpl", body.renames(use))
    messages = [message.for_template() for message in body.messages]
    options = {**body.options(use), **job.options(body.cache_salt)}
    form = body.form(use, gateway.settings)
    if body.stream:
        stream = job.client.chat(messages, stream=True, **options)
        return await gateway.stream(request, job, [stream], _Events(job, body, form))

    async def work() -> tuple[Result, int | None]:
        result = await job.client.chat(messages, **options)
        return result, await reasoning_tokens(job.client, form, [result])

    return await gateway.answer(request, job, work(), lambda made: _whole(job, body, form, *made))


def new_call_id(start: CallStart) -> str:
    """An id for a tool call."""
    if start.short_id:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def parse_output(form: OutputForm, text: str) -> list[Piece]:
    """The parts of a whole output."""
    parser = OutputParser(form)
    return joined([*parser.feed(text), *parser.finish()])


def _whole(
    job: Job, body: ChatRequest, form: OutputForm, result: Result, reasoning: int | None
) -> dict[str, Any]:
    choices = []
    for choice in result.choices:
        message = _message(parse_output(form, choice.text))
        made: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": None,
            "finish_reason": _reason(choice.finish_reason, "tool_calls" in message),
            "stop_reason": choice.stop_reason,
        }
        if body.logprobs:
            made["logprobs"] = chat_logprobs(choice.logprobs or (), body.top_logprobs or 0)
        if body.return_token_ids:
            made["token_ids"] = list(choice.token_ids or ())
        choices.append(made)
    answer = {
        **job.head("chat.completion"),
        "choices": choices,
        "usage": usage([result], reasoning),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = listed(result)
    return answer


def _message(pieces: Iterable[Piece]) -> dict[str, Any]:
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, Text):
            content += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"id": new_call_id(piece), "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _reason(reason: str | None, has_calls: bool) -> str:
    ended = finish_reason(reason)
    return "tool_calls" if ended == "stop" and has_calls else ended


class _ChoiceState:
    """What is known of one choice of a stream."""

    def __init__(self, form: OutputForm) -> None:
        self.parser = OutputParser(form)
        self.has_calls = False
        self.has_ended = False


class _Events:
    """The answer in events."""

    def __init__(self, job: Job, body: ChatRequest, form: OutputForm) -> None:
        self._job = job
        self._body = body
        self._form = form
        self._choices = [_ChoiceState(form) for _ in range(body.n or 1)]
        self._include_usage = bool((body.stream_options or StreamOptions()).include_usage)

    def first(self) -> bytes:
        """The role, of each choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, delta) for index in range(len(self._choices)))

    def feed(self, prompt: int, delta: Delta) -> bytes:
        """The parts that are told apart by now, and why the choice ended if it did."""
        choice = self._choices[delta.index]
        pieces = choice.parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = joined([*pieces, *choice.parser.finish()])
        extra: dict[str, Any] = {}
        if self._body.logprobs and delta.logprobs:
            extra["logprobs"] = chat_logprobs(delta.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids and delta.token_ids:
            extra["token_ids"] = list(delta.token_ids)
        data = b""
        if extra and not pieces:
            data += self._chunk(delta.index, {"content": ""}, **extra)
        for piece in pieces:
            choice.has_calls |= isinstance(piece, CallStart)
            data += self._chunk(delta.index, _delta(piece), **extra)
            extra = {}
        if delta.finish_reason is not None:
            choice.has_ended = True
            reason = _reason(delta.finish_reason, choice.has_calls)
            data += self._chunk(
                delta.index, {}, finish_reason=reason, stop_reason=delta.stop_reason
            )
        return data

    async def last(self, results: Sequence[Result]) -> bytes:
        """The counts, and the end."""
        if not all(choice.has_ended for choice in self._choices):
            finish_reason(None)
        data = b""
        if self._include_usage:
            head = self._job.head("chat.completion.chunk")
            reasoning = await reasoning_tokens(self._job.client, self._form, results)
            data = event({**head, "choices": [], "usage": usage(results, reasoning)})
        return data + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.body())

    def translate(self, error: TridentError) -> ApiError:
        """In this request's names."""
        return self._job.translate(error)

    def _chunk(self, index: int, delta: dict[str, Any], **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._job.head("chat.completion.chunk"), "choices": [choice]}
        return event({**chunk, "usage": None} if self._include_usage else chunk)


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, Arguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    call = {
        "index": piece.index,
        "id": new_call_id(piece),
        "type": "function",
        "function": {"name": piece.name, "arguments": ""},
    }
    return {"tool_calls": [call]}
