"""The asyncio client: the methods of `trident_client.Client`, awaited.

Owns the public methods and what they give back; the I/O is `trident_client._aio_connection`'s.
Invariant: cancelling a task that waits here cancels its request on the server, and no other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, overload

from trident_client import _request
from trident_client._aio_connection import AsyncCall, AsyncConnection, last_response
from trident_client._channel import TLS, Keepalive, RetryPolicy, Settings
from trident_client._request import Prompt, Prompts
from trident_client.results import Collector, Delta, Embeddings, ModelInfo, Result, Usage

__all__ = ["AsyncClient", "AsyncStream"]

Messages = Sequence[Mapping[str, Any]]


class _Iteration:
    """One ``async for``. It cancels when dropped: that is how leaving the loop is noticed."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __aiter__(self) -> _Iteration:
        return self

    async def __anext__(self) -> Delta:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and with it the request
            self._stream.cancel()


class AsyncStream:
    """The output of one request while it is made: an async iterator of `Delta` and context manager.

    Nothing is sent before the first of ``async with``, ``async for`` and `result`. Leaving the
    ``async with``, or the ``async for``, before the end cancels the request on the server at once.

    >>> async def complete():
    ...     async with AsyncClient(url) as client:
    ...         return [delta.text async for delta in client.stream("Hello")]
    >>> asyncio.run(complete())
    ['Hel', 'lo th', 'ere']
    """

    def __init__(self, call: AsyncCall) -> None:
        self._call = call
        self._collector = Collector()
        self._waiting: list[Delta] = []

    @property
    def request_id(self) -> str:
        """The id under which the server knows the request."""
        return self._call.exchange.request_id

    @property
    def usage(self) -> Usage:
        """The request's tokens so far, also of one that was cancelled or failed."""
        return self._collector.usage

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _Iteration(self)

    async def __anext__(self) -> Delta:
        delta = await self._next()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def __aenter__(self) -> AsyncStream:
        await self._call.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and with it the request
            self.cancel()

    def cancel(self) -> None:
        """Cancel the request; any number of times, harmless after the end."""
        self._call.cancel()

    async def result(self) -> Result:
        """Read what is left, then give the whole output, including what was read before."""
        while await self._next() is not None:
            pass
        return self._collector.result(self.request_id)

    async def _next(self) -> Delta | None:
        while not self._waiting:
            response = await self._call.read()
            if response is None:
                return None
            self._waiting = self._collector.feed(response)
        return self._waiting.pop(0)


class AsyncClient:
    """A client for one model of a Triton server.

    Sampling parameters are passed by name and as they are to the server. Every method raises `trident_client.errors.TridentError`.

    The connection belongs to the event loop of the first call. What is said of the parameters of
    `trident_client.Client` holds here too.

    >>> async def complete():
    ...     async with AsyncClient(url, "llm") as client:
    ...         return await client.generate("Hello", max_tokens=8)
    >>> asyncio.run(complete()).text
    'Hello there'
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        model: str = "llm",
        *,
        model_version: str = "",
        timeout: float | None = None,
        ssl: bool | TLS = False,
        headers: Mapping[str, str] | None = None,
        keepalive: Keepalive | None = None,
        retries: int | RetryPolicy = 2,
        concurrency: int = 64,
    ) -> None:
        settings = Settings(
            url,
            model,
            model_version,
            timeout,
            ssl,
            dict(headers or {}),
            keepalive or Keepalive(),
            retries,
            concurrency,
        )
        self._connection = AsyncConnection(settings)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is under way and close the connection; any number of times.

        Any later call raises RuntimeError.
        """
        await self._connection.close()

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> Result: ...
    @overload
    async def generate(
        self,
        prompt: Prompts,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> list[Result]: ...
    async def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> Result | list[Result]:
        """Complete `prompt`: a text or token ids, or a list of these, completed at the same time.

        Of several, the first that fails cancels the others and its error is raised.
        """
        prompts, several = _request.split_prompts(prompt, "prompt")
        extras = _request.Extras(cache_salt, return_perf_metrics)
        builds = [
            _request.generate(each, stream=False, sampling=sampling, extras=extras)
            for each in prompts
        ]
        calls = [AsyncCall(self._connection, build, timeout) for build in builds]
        results = await self._connection.run_all(calls, lambda call: AsyncStream(call).result())
        return results if several else results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> AsyncStream:
        """Complete one `prompt`, a text or token ids, and give its pieces as they are made.

        The time of `timeout` runs from this call.
        """
        extras = _request.Extras(cache_salt, return_perf_metrics)
        build = _request.generate(prompt, stream=True, sampling=sampling, extras=extras)
        return AsyncStream(AsyncCall(self._connection, build, timeout))

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        stream: Literal[False] = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **options: object,
    ) -> Coroutine[Any, Any, Result]: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        stream: Literal[True],
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **options: object,
    ) -> AsyncStream: ...
    def chat(
        self,
        messages: Messages,
        *,
        tools: Messages | None = None,
        stream: bool = False,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **options: object,
    ) -> Coroutine[Any, Any, Result] | AsyncStream:
        """Answer a conversation; the server renders it with the model's chat template.

        `options` are sampling parameters, and the template's: `tool_choice`, `chat_template_kwargs`,
        `add_generation_prompt`, `continue_final_message`.

        >>> async def ask():
        ...     async with AsyncClient(url) as client:
        ...         return await client.chat([{"role": "user", "content": "Hello"}])
        >>> asyncio.run(ask()).text
        'Hello there'
        """
        extras = _request.Extras(cache_salt, return_perf_metrics)
        build = _request.chat(messages, {"tools": tools, **options}, stream=stream, extras=extras)
        running = AsyncStream(AsyncCall(self._connection, build, timeout))
        return running if stream else running.result()

    async def embed(
        self,
        text: Prompt | Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Embeddings:
        """The embedding of `text`, or of each of a list of texts.

        Needs a model that embeds. `dimensions` asks for shorter vectors, `truncate_prompt_tokens` cuts
        a text behind so many tokens (-1: as many as the model takes) that would be refused for its
        length otherwise. Vectors are normalised as the model says, or as `normalize` does.
        """
        prompts, _ = _request.split_prompts(text, "text")
        pooling = {
            "dimensions": dimensions,
            "normalize": normalize,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        calls = [
            AsyncCall(self._connection, _request.embed(each, pooling), timeout) for each in prompts
        ]
        return _request.embeddings_of(await self._connection.run_all(calls, last_response))

    async def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """The token ids of `text`, as the server would make them of a prompt."""
        operation = {"op": "tokenize", "text": text}
        return _request.token_ids_of(await self.control(operation, timeout=timeout))

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`."""
        operation = {"op": "detokenize", "token_ids": token_ids}
        return _request.text_of(await self.control(operation, timeout=timeout))

    async def control(
        self, operation: Mapping[str, object], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Any `control` operation, such as ``{"op": "tokenize", "text": "Hi"}``, and its answer."""
        call = AsyncCall(self._connection, _request.control(operation), timeout)
        return _request.control_reply(await last_response(call))

    async def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """A snapshot of the engine: its blocks, rows and queue, as the server reports them."""
        return await self.control({"op": "stats"}, timeout=timeout)

    async def is_live(self, *, timeout: float | None = 5.0) -> bool:
        """Whether the server answers at all."""
        return await self._connection.live(timeout)

    async def is_ready(self, *, timeout: float | None = 5.0) -> bool:
        """Whether the server and the model take requests."""
        return await self._connection.ready(timeout)

    async def metadata(self, *, timeout: float | None = None) -> ModelInfo:
        """The model as the server has it now; calls use what was last read."""
        return await self._connection.refresh_model(timeout)
