"""``POST /v1/completions``: texts or token ids, continued."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic import Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from trident_client import AsyncClient, Choice, Delta, Result, TridentError
from trident_client.openai.errors import ApiError, bad_request
from trident_client.openai.fields import MAX_CHOICES, Generation, StreamOptions, parse_body
from trident_client.openai.gateway import Gateway, Job
from trident_client.openai.http import read_json
from trident_client.openai.prompt_scores import echoed_logprobs, first_pieces, listed
from trident_client.openai.prompts import Prompt, checked_prompts, split_prompts
from trident_client.openai.sse import event
from trident_client.openai.usage import completion_logprobs, finish_reason, usage

__all__ = ["CompletionRequest", "completions"]


class CompletionRequest(Generation):
    """The body."""

    prompt: Any = Field()
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: Literal[True] | None = None

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        return checked_prompts(value)

    def prompts(self) -> list[Prompt]:
        """Each prompt."""
        return split_prompts(self.prompt)

    def check(self) -> None:
        """Raises `ApiError` for what cannot be done, before anything is made for it."""
        if (self.n or 1) * len(self.prompts()) > MAX_CHOICES:
            raise bad_request("n", f"times the number of prompts must be at most {MAX_CHOICES}")
        if self.suffix:
            raise bad_request("suffix", "is not supported; leave it out", "unsupported_parameter")
        if self.stream and (self.prompt_logprobs is not None or self.scores_echo):
            name = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            raise bad_request(name, "log-probabilities of the prompt are not given in a stream")
        if self.max_tokens == 0 and not (self.echo and not self.stream):
            raise bad_request("max_tokens", "may be 0 only with echo, and not in a stream")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "may be given only with stream")
        if self.return_token_ids and (self.n or 1) > 1:
            raise bad_request("return_token_ids", "may be given only with n of 1")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise bad_request("best_of", "must be n in a stream: the best are known at the end")

    @property
    def scores_echo(self) -> bool:
        """Whether the echoed prompt has log-probabilities too."""
        return bool(self.echo) and self.logprobs is not None

    def sampling(self) -> dict[str, Any]:
        """What goes to the server."""
        return {
            **self.given(),
            # The server takes the word for "to the end of the context"; None would be left out.
            "max_tokens": "null" if self.max_tokens is None else self.max_tokens,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.scores_echo else self.prompt_logprobs,
        }


async def completions(gateway: Gateway, request: Request) -> Response:
    """The endpoint."""
    body = parse_body(CompletionRequest, await read_json(request))
    body.check()
    job = gateway.job(request, body, "cmpl")
    prompts = body.prompts()
    options = {**body.sampling(), **job.options(body.cache_salt)}
    nothing = [""] * len(prompts)
    try:
        echoes = await _echoes(job.client, prompts) if body.echo else nothing
        firsts = await first_pieces(job.client, prompts) if body.scores_echo else nothing
    except TridentError as error:
        raise job.translate(error) from None
    maker = _Maker(job, body, echoes, firsts)
    if body.stream:
        streams = [job.client.stream(prompt, **options) for prompt in prompts]
        return await gateway.stream(request, job, streams, maker)
    work = job.client.generate(cast("list[str]", prompts), **options)  # or of lists of ids
    return await gateway.answer(request, job, work, maker.whole)


async def _echoes(client: AsyncClient, prompts: Sequence[Prompt]) -> list[str]:
    async def text(prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else await client.detokenize(prompt)

    return list(await asyncio.gather(*map(text, prompts)))


class _Maker:
    """The answer, whole or in events. Choices are numbered through all prompts."""

    def __init__(
        self, job: Job, body: CompletionRequest, echoes: Sequence[str], firsts: Sequence[str]
    ) -> None:
        self._job = job
        self._body = body
        self._echoes = echoes
        self._firsts = firsts  # the text of each prompt's first token, where that is needed
        self._n = body.n or 1
        self._offsets: dict[int, int] = {}  # in the text, by choice: where the next token stands
        self._unfinished = set(range(self._n * len(echoes)))
        self._include_usage = bool((body.stream_options or StreamOptions()).include_usage)

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [
            self._whole_choice(prompt, result, choice)
            for prompt, result in enumerate(results)
            for choice in result.choices
        ]
        return {**self._job.head("text_completion"), "choices": choices, "usage": usage(results)}

    def _whole_choice(self, prompt: int, result: Result, choice: Choice) -> dict[str, Any]:
        echo = self._echoes[prompt]
        logprobs = None if self._body.scores_echo else choice.logprobs
        made = self._choice(prompt, choice.index, echo + choice.text, logprobs, choice.token_ids)
        made["finish_reason"] = finish_reason(choice.finish_reason)
        made["stop_reason"] = choice.stop_reason
        if self._body.scores_echo:
            made["logprobs"] = echoed_logprobs(
                result,
                choice.logprobs,
                first=self._firsts[prompt],
                echo=echo,
                num_top=self._body.logprobs or 0,
            )
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = listed(result)
        return made

    def first(self) -> bytes:
        """The prompts, if they are to be echoed."""
        return b"".join(
            self._chunk(self._choice(prompt, index, echo, None, None))
            for prompt, echo in enumerate(self._echoes)
            for index in range(self._n)
            if echo
        )

    def feed(self, prompt: int, delta: Delta) -> bytes:
        """The text and, apart from it, the reason why it ended: some clients drop text beside one."""
        data = b""
        ids = delta.token_ids if self._body.return_token_ids else None
        if delta.text or delta.logprobs or ids:
            choice = self._choice(prompt, delta.index, delta.text, delta.logprobs, delta.token_ids)
            data += self._chunk(choice)
        if delta.finish_reason is not None:
            end = self._choice(prompt, delta.index, "", None, ())
            end["finish_reason"] = finish_reason(delta.finish_reason)
            end["stop_reason"] = delta.stop_reason
            self._unfinished.discard(end["index"])
            data += self._chunk(end)
        return data

    async def last(self, results: Sequence[Result]) -> bytes:
        """The counts, and the end."""
        if self._unfinished:
            finish_reason(None)
        data = b""
        if self._include_usage:
            chunk = {**self._job.head("text_completion"), "choices": [], "usage": usage(results)}
            data = event(chunk)
        return data + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.body())

    def translate(self, error: TridentError) -> ApiError:
        """In this request's names."""
        return self._job.translate(error)

    def _choice(
        self, prompt: int, index: int, text: str, logprobs: Any, token_ids: Any
    ) -> dict[str, Any]:
        number = prompt * self._n + index
        choice = {"index": number, "text": text, "logprobs": None, "finish_reason": None}
        if logprobs is not None and self._body.logprobs is not None:
            shaped = completion_logprobs(
                logprobs, self._body.logprobs, self._offsets.get(number, 0)
            )
            self._offsets[number] = self._offsets.get(number, 0) + sum(map(len, shaped["tokens"]))
            choice["logprobs"] = shaped
        if self._body.return_token_ids:
            choice["token_ids"] = list(token_ids or ())
        return choice

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._job.head("text_completion"), "choices": [choice]}
        return event({**chunk, "usage": None} if self._include_usage else chunk)
