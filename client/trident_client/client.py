"""The blocking client. Uses no asyncio, so that it works inside notebooks and event loops too.

Owns the public methods and what they give back; the I/O is `trident_client._connection`'s.
Invariant: a `Client` may be shared by threads, a `Stream` is read by one and cancelled by any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from trident_client import _request
from trident_client._channel import TLS, Keepalive, RetryPolicy, Settings
from trident_client._connection import Call, Connection, last_response
from trident_client._request import BuildInputs, Prompt, Prompts
from trident_client.results import Collector, Delta, Embeddings, ModelInfo, Result, Usage

__all__ = ["Client", "Stream"]

Messages = Sequence[Mapping[str, Any]]


class Stream:
    """The output of one request while it is made: an iterator of `Delta` and a context manager.

    Leaving the ``with``, or the ``for``, before the end cancels the request on the server at once.

    >>> with client.stream("Hello") as stream:
    ...     first = next(stream)
    >>> first.text
    'Hel'
    >>> "".join(delta.text for delta in client.stream("Hello"))
    'Hello there'
    """

    def __init__(self, call: Call) -> None:
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

    def __iter__(self) -> Iterator[Delta]:
        # A generator, because a `for` that is left drops it, and only it: that is when to cancel.
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.cancel()

    def __next__(self) -> Delta:
        delta = self._next()
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request; from any thread, any number of times, harmless after the end."""
        self._call.cancel()

    def result(self) -> Result:
        """Read what is left, then give the whole output, including what was read before.

        >>> client.stream("Hello").result().text
        'Hello there'
        """
        while self._next() is not None:
            pass
        return self._collector.result(self.request_id)

    def _next(self) -> Delta | None:
        while not self._waiting:
            response = self._call.read()
            if response is None:
                return None
            self._waiting = self._collector.feed(response)
        return self._waiting.pop(0)


class Client:
    """A client for one model of a Triton server.

    `url` is host:port of the server's gRPC endpoint. `timeout` (seconds) is the default deadline of a
    call, retries included; every method takes its own. `ssl` is True, or `TLS` settings. `headers`
    travel with every call. `retries` is how often a request that found the server unreachable or
    overloaded is tried again, only ever before its first token. `concurrency` is how many prompts of
    one `generate()` or `embed()` are under way at a time.

    Sampling parameters are passed by name and as they are to the server, which checks them; None
    means not given. Requests share cached prefixes only with those of the same `cache_salt`;
    `return_perf_metrics` fills the result's `times`. Every method raises `trident_client.errors.TridentError`.

    >>> with Client(url, "llm") as client:
    ...     result = client.generate("Hello", max_tokens=8)
    >>> result.text, result.finish_reason, result.usage.completion_tokens
    ('Hello there', 'stop', 3)
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
        self._connection = Connection(settings)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is under way and close the connection; any number of times.

        Any later call raises RuntimeError.
        """
        self._connection.close()

    @overload
    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Prompts,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> list[Result]: ...
    def generate(
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

        >>> [result.text for result in client.generate(["Hello", "Hello"])]
        ['Hello there', 'Hello there']
        """
        prompts, several = _request.split_prompts(prompt, "prompt")
        extras = _request.Extras(cache_salt, return_perf_metrics)
        builds = [
            _request.generate(each, stream=False, sampling=sampling, extras=extras)
            for each in prompts
        ]
        calls = [Call(self._connection, build, timeout) for build in builds]
        results = self._connection.run_all(calls, lambda call: Stream(call).result())
        return results if several else results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        return_perf_metrics: bool = False,
        **sampling: object,
    ) -> Stream:
        """Complete one `prompt`, a text or token ids, and give its pieces as they are made."""
        extras = _request.Extras(cache_salt, return_perf_metrics)
        build = _request.generate(prompt, stream=True, sampling=sampling, extras=extras)
        return self._stream(build, timeout)

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
    ) -> Result: ...
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
    ) -> Stream: ...
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
    ) -> Result | Stream:
        """Answer a conversation; the server renders it with the model's chat template.

        `options` are sampling parameters, and the template's: `tool_choice`, `chat_template_kwargs`,
        `add_generation_prompt`, `continue_final_message`.

        >>> client.chat([{"role": "user", "content": "Hello"}]).text
        'Hello there'
        """
        extras = _request.Extras(cache_salt, return_perf_metrics)
        build = _request.chat(messages, {"tools": tools, **options}, stream=stream, extras=extras)
        running = self._stream(build, timeout)
        return running if stream else running.result()

    def embed(
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
        calls = [Call(self._connection, _request.embed(each, pooling), timeout) for each in prompts]
        return _request.embeddings_of(self._connection.run_all(calls, last_response))

    def tokenize(self, text: str, *, timeout: float | None = None) -> list[int]:
        """The token ids of `text`, as the server would make them of a prompt.

        >>> client.tokenize("Hi")
        [72, 105]
        """
        return _request.token_ids_of(
            self.control({"op": "tokenize", "text": text}, timeout=timeout)
        )

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of `token_ids`.

        >>> client.detokenize([72, 105])
        'Hi'
        """
        operation = {"op": "detokenize", "token_ids": token_ids}
        return _request.text_of(self.control(operation, timeout=timeout))

    def control(
        self, operation: Mapping[str, object], *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Any `control` operation, such as ``{"op": "tokenize", "text": "Hi"}``, and its answer."""
        return _request.control_reply(
            last_response(Call(self._connection, _request.control(operation), timeout))
        )

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """A snapshot of the engine: its blocks, rows and queue, as the server reports them."""
        return self.control({"op": "stats"}, timeout=timeout)

    def is_live(self, *, timeout: float | None = 5.0) -> bool:
        """Whether the server answers at all."""
        return self._connection.live(timeout)

    def is_ready(self, *, timeout: float | None = 5.0) -> bool:
        """Whether the server and the model take requests.

        >>> client.is_live(), client.is_ready()
        (True, True)
        """
        return self._connection.ready(timeout)

    def metadata(self, *, timeout: float | None = None) -> ModelInfo:
        """The model as the server has it now; calls use what was last read.

        >>> client.metadata().inputs["text_input"]
        'BYTES'
        """
        return self._connection.refresh_model(timeout)

    def _stream(self, build: BuildInputs, timeout: float | None) -> Stream:
        call = Call(self._connection, build, timeout)
        call.start()
        return Stream(call)
