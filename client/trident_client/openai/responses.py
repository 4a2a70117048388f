"""``POST /v1/responses``: a conversation, answered in items. Nothing is stored."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trident_client import Delta, Result, TridentError
from trident_client.openai.chat import new_call_id
from trident_client.openai.errors import ApiError
from trident_client.openai.fields import parse_body
from trident_client.openai.gateway import Gateway, Job
from trident_client.openai.http import read_json
from trident_client.openai.output.parser import OutputForm, OutputParser
from trident_client.openai.output.pieces import Arguments, CallStart, Piece, Reasoning, joined
from trident_client.openai.reasoning_tokens import reasoning_tokens
from trident_client.openai.responses_request import ResponsesRequest
from trident_client.openai.sse import event
from trident_client.openai.usage import finish_reason, usage

__all__ = ["responses"]

# By kind of item: the field that grows, the type of its part, and the events' common name.
_PARTS = {
    "message": ("text", "output_text", "response.output_text"),
    "reasoning": ("text", "reasoning_text", "response.reasoning_text"),
    "function_call": ("arguments", "", "response.function_call_arguments"),
}

# The chat's parameters, by what they are called here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


async def responses(gateway: Gateway, request: Request) -> Response:
    """The endpoint."""
    body = parse_body(ResponsesRequest, await read_json(request))
    try:
        chat = body.as_chat()
        chat.check()
        use = chat.tool_use(gateway.settings)
    except ApiError as error:
        if error.param is not None:
            error.param = _NAMES.get(error.param, error.param)
        raise
    job = gateway.job(request, body, "resp", {**chat.renames(use), **_NAMES})
    messages = [message.for_template() for message in chat.messages]
    options = {**chat.options(use), **job.options(body.cache_salt)}
    form = chat.form(use, gateway.settings)
    maker = _Maker(job, body, form)
    if body.stream:
        stream = job.client.chat(messages, stream=True, **options)
        return await gateway.stream(request, job, [stream], maker)

    async def work() -> tuple[Result, int | None]:
        result = await job.client.chat(messages, **options)
        return result, await reasoning_tokens(job.client, form, [result])

    return await gateway.answer(request, job, work(), lambda made: maker.whole(*made))


class _Maker:
    """Builds the items of an answer, and tells of each step in an event."""

    def __init__(self, job: Job, body: ResponsesRequest, form: OutputForm) -> None:
        self._job = job
        self._body = body
        self._form = form
        self._parser = OutputParser(form)
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the one that grows
        self._texts: list[str] = []  # of it
        self._reason: str | None = None
        self._sequence = 0

    def whole(self, result: Result, reasoning: int | None) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        self._take(self._parser.feed(result.text))
        self._take(self._parser.finish())
        self._reason = finish_reason(result.finish_reason)
        self._close_item()
        return self._response(usage([result], reasoning))

    def first(self) -> bytes:
        """The response as it begins."""
        began = self._event("response.created", response=self._response(None))
        return began + self._event("response.in_progress", response=self._response(None))

    def feed(self, prompt: int, delta: Delta) -> bytes:
        """The parts that are told apart by now."""
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = joined([*pieces, *self._parser.finish()])
        data = self._take(pieces)
        if delta.finish_reason is not None:
            self._reason = finish_reason(delta.finish_reason)
            data += self._close_item()
        return data

    async def last(self, results: Sequence[Result]) -> bytes:
        """The response as it ends."""
        finish_reason(self._reason)
        reasoning = await reasoning_tokens(self._job.client, self._form, results)
        ended = self._response(usage(results, reasoning))
        return self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ApiError) -> bytes:
        """The response as it failed."""
        told = {"code": "server_error", "message": str(error)}
        response = {**self._response(None), "status": "failed", "error": told}
        return self._event("response.failed", response=response)

    def translate(self, error: TridentError) -> ApiError:
        """In this request's names."""
        return self._job.translate(error)

    def _take(self, pieces: Sequence[Piece]) -> bytes:
        data = b""
        for piece in pieces:
            if isinstance(piece, CallStart):
                data += self._close_item()
                data += self._open_item(
                    "function_call", call_id=new_call_id(piece), name=piece.name
                )
                continue
            kind = "reasoning" if isinstance(piece, Reasoning) else "message"
            kind = "function_call" if isinstance(piece, Arguments) else kind
            if self._item is None or self._item["type"] != kind:
                if kind == "message" and not piece.text.strip() and self._output:
                    continue  # whitespace between two items
                data += self._close_item() + self._open_item(kind)
            self._texts.append(piece.text)
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            data += self._grow(kind, "delta", delta=piece.text, **logprobs)
        return data

    def _open_item(self, kind: str, **fields: Any) -> bytes:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {
            "id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields,
        }  # fmt: skip
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item["arguments"] = ""
        self._item, self._texts = item, []
        data = self._event("response.output_item.added", output_index=len(self._output), item=item)
        if kind != "function_call":
            data += self._part("response.content_part.added", kind, "")
        return data

    def _close_item(self) -> bytes:
        if self._item is None:
            return b""
        item, text = self._item, "".join(self._texts)
        kind = item["type"]
        field, _, _ = _PARTS[kind]
        fields: dict[str, Any] = {field: text}
        if kind == "message":
            fields["logprobs"] = []
        elif kind == "function_call":
            fields["name"] = item["name"]
        data = self._grow(kind, "done", **fields)
        if kind == "function_call":
            item = {**item, "arguments": text}
        else:
            data += self._part("response.content_part.done", kind, text)
            item = {**item, "content": [_part(kind, text)]}
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        data += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = None
        return data

    def _grow(self, kind: str, step: str, **fields: Any) -> bytes:
        assert self._item is not None
        if kind != "function_call":
            fields["content_index"] = 0
        return self._event(
            f"{_PARTS[kind][2]}.{step}",
            item_id=self._item["id"], output_index=len(self._output), **fields,
        )  # fmt: skip

    def _part(self, name: str, kind: str, text: str) -> bytes:
        assert self._item is not None
        return self._event(
            name, item_id=self._item["id"], output_index=len(self._output), content_index=0,
            part=_part(kind, text),
        )  # fmt: skip

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": name, "sequence_number": self._sequence - 1, **fields}, name)

    def _response(self, counts: dict[str, Any] | None) -> dict[str, Any]:
        body = self._body
        cut = self._reason == "length"
        ended = "incomplete" if cut else "completed"
        shown = body.model_dump(
            include={"instructions", "max_output_tokens", "temperature", "top_p", "tool_choice"}
        )
        return {
            **self._job.head("response", created="created_at"),
            **shown,
            "status": "in_progress" if counts is None else ended,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if counts is None else _response_usage(counts),
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind][1], "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "message" else part


def _response_usage(counts: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": counts["total_tokens"],
    }
