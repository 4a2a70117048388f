"""The asyncio client against the scripted server; what it shares with the other is tested there."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import pytest

from trident_client import (
    AsyncClient,
    AsyncStream,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidArgument,
    ServerError,
    Stream,
    StreamInterrupted,
    Unavailable,
    UnsupportedFeature,
)

from .conftest import QUICK
from .fake_server import VLLM_INPUTS, WAIT, FakeServer, Request, forever, hello, message

_T = TypeVar("_T")
Use = Callable[[AsyncClient], Awaitable[_T]]


def with_client(server: FakeServer, use: Use[_T], **options: Any) -> _T:
    async def main() -> _T:
        async with AsyncClient(server.url, retries=QUICK, **options) as client:
            return await asyncio.wait_for(use(client), WAIT)

    return asyncio.run(main())


async def ended(request: Request) -> bool:
    """Whether the server saw a cancel, waited for without stopping the loop."""
    return await asyncio.to_thread(request.cancelled)


def test_generate_and_stream(server: FakeServer) -> None:
    async def use(client: AsyncClient) -> None:
        result = await client.generate("Hi", max_tokens=3)
        assert (result.text, result.token_ids) == ("Hello there", (10, 11, 12))
        stream = client.stream("Hi")
        assert [delta.text async for delta in stream] == ["Hel", "lo th", "ere"]
        assert (await stream.result()).usage.completion_tokens == 3
        for request in server.requests:
            assert not await ended(request)

    with_client(server, use)


def test_result_takes_the_rest(server: FakeServer) -> None:
    async def use(client: AsyncClient) -> str:
        async with client.stream("Hi") as stream:
            assert (await stream.__anext__()).text == "Hel"
            return (await stream.result()).text

    assert with_client(server, use) == "Hello there"


def test_leaving_the_with_cancels_on_the_server(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        async with client.stream("Hi") as stream:
            assert (await stream.__anext__()).text == "first"
            request = server.one()
            assert not request.ended.is_set()
        assert await ended(request)
        with pytest.raises(Cancelled):
            await stream.result()

    with_client(server, use)


def test_leaving_the_for_cancels_on_the_server(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        stream = client.stream("Hi")
        async for delta in stream:
            assert delta.text == "first"
            break
        assert await ended(server.one())
        with pytest.raises(Cancelled):
            await stream.__anext__()

    with_client(server, use)


def test_cancelling_the_task_cancels_on_the_server_and_only_that(server: FakeServer) -> None:
    go_on = threading.Event()

    def script(request: Request) -> Iterator[Any]:
        if request.inputs["text_input"] == "stay":
            assert go_on.wait(WAIT)
            yield message(text_output=["stays"], final=True)
        else:
            request.ended.wait(WAIT)

    server.script = script

    async def use(client: AsyncClient) -> None:
        stays = asyncio.ensure_future(client.generate("stay"))
        leaves = asyncio.ensure_future(client.generate("leave"))
        for _ in range(2):
            await asyncio.to_thread(server.one)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        by_text = {request.inputs["text_input"]: request for request in server.requests}
        assert await ended(by_text["leave"])
        go_on.set()
        assert (await stays).text == "stays"
        assert not await ended(by_text["stay"])

    with_client(server, use)


def test_cancel_wakes_the_reader_with_our_error_not_with_a_task_cancel(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        stream = client.stream("Hi")
        await stream.__anext__()
        reading = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)  # one turn of the loop: the reader now waits
        stream.cancel()
        with pytest.raises(Cancelled):
            await reading
        assert await ended(server.one())

    with_client(server, use)


def test_close_cancels_what_is_under_way(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        stream = client.stream("Hi")
        await stream.__anext__()
        await client.close()
        with pytest.raises(Cancelled):
            await stream.__anext__()
        assert await ended(server.one())
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("Hi")

    with_client(server, use)


def test_the_deadline_ends_the_request_on_both_sides(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        await client.metadata()
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await client.stream("Hi", timeout=0.2).result()
        assert await ended(server.one())

    with_client(server, use)


def test_errors(server: FakeServer) -> None:
    async def use(client: AsyncClient) -> None:
        server.script = lambda request: iter([message(error="INVALID_ARG n: too many", final=True)])
        with pytest.raises(InvalidArgument) as caught:
            await client.generate("Hi")
        assert caught.value.field == "n"
        server.script = lambda request: iter([message(text_output=["Hel"])])
        with pytest.raises(StreamInterrupted):
            await client.stream("Hi").result()
        server.script = _fault
        with pytest.raises(ServerError, match="a fault"):
            await client.stream("Hi").result()
        server.stop()
        with pytest.raises(ConnectionFailed):
            await client.generate("Hi")
        assert not await client.is_live()

    with_client(server, use)


def _fault(request: Request) -> Iterator[Any]:
    yield message(text_output=["a"])
    request.context.abort(grpc.StatusCode.INTERNAL, "INTERNAL engine: a fault")


def test_retries_only_before_the_first_token(server: FakeServer) -> None:
    def busy_once(request: Request) -> Iterator[Any]:
        if len(server.requests) == 1:
            yield message(error="UNAVAILABLE queue: full", final=True)
        else:
            yield from hello(request)

    def busy_later(request: Request) -> Iterator[Any]:
        yield message(text_output=["a"])
        yield message(error="UNAVAILABLE engine: stopping", final=True)

    async def use(client: AsyncClient) -> None:
        server.script = busy_once
        server.metadata_failures = [(grpc.StatusCode.UNAVAILABLE, "Socket closed")]
        assert (await client.generate("Hi")).text == "Hello there"
        assert len(server.requests) == 2  # and one retry went into the metadata
        server.script = busy_later
        with pytest.raises(Unavailable):
            await client.stream("Hi").result()
        assert len(server.requests) == 3

    with_client(server, use)


def test_several_prompts_run_at_the_same_time_in_order(server: FakeServer) -> None:
    together = threading.Barrier(4)

    def script(request: Request) -> Iterator[Any]:
        together.wait(WAIT)
        yield message(text_output=[request.inputs["text_input"].upper()], final=True)

    server.script = script

    async def use(client: AsyncClient) -> list[str]:
        return [result.text for result in await client.generate(["a", "b", "c", "d"])]

    assert with_client(server, use) == ["A", "B", "C", "D"]
    assert server.metadata_calls == 1


def test_a_stream_that_is_dropped_is_cancelled(server: FakeServer) -> None:
    server.script = forever

    async def use(client: AsyncClient) -> None:
        stream = client.stream("Hi")
        await stream.__anext__()
        del stream
        gc.collect()
        assert await ended(server.one())

    with_client(server, use)


def test_no_more_prompts_at_a_time_than_asked(server: FakeServer) -> None:
    lock = threading.Lock()
    running = [0, 0]  # now, at most

    def script(request: Request) -> Iterator[Any]:
        with lock:
            running[0] += 1
            running[1] = max(running)
        yield message(text_output=["a"])
        with lock:
            running[0] -= 1
        yield message(final=True)

    server.script = script

    async def use(client: AsyncClient) -> int:
        return len(await client.generate(["a"] * 24))

    assert with_client(server, use, concurrency=2) == 24
    assert running[1] <= 2


def test_of_several_prompts_a_failing_one_cancels_the_others(server: FakeServer) -> None:
    together = threading.Barrier(3)

    def script(request: Request) -> Iterator[Any]:
        together.wait(WAIT)
        if request.inputs["text_input"] == "bad":
            yield message(error="INVALID_ARG text_input: bad", final=True)
        else:
            request.ended.wait(WAIT)

    server.script = script

    async def use(client: AsyncClient) -> None:
        with pytest.raises(InvalidArgument):
            await client.generate(["a", "bad", "c"])
        for request in server.requests:
            assert request.inputs["text_input"] == "bad" or await ended(request)

    with_client(server, use)


def test_everything_else(server: FakeServer) -> None:
    async def use(client: AsyncClient) -> None:
        assert await client.detokenize(await client.tokenize("Hi é")) == "Hi é"
        assert await client.stats() == {"num_free_blocks": 7}
        assert await client.is_live()
        assert await client.is_ready()
        messages = [{"role": "user", "content": "Hi"}]
        assert (await client.chat(messages, max_tokens=3)).text == "Hello there"
        async with client.chat(messages, stream=True) as stream:
            assert [delta.text async for delta in stream] == ["Hel", "lo th", "ere"]
        server.script = lambda request: iter([message(embedding=[0.5, 1.0], final=True)])
        assert (await client.embed("Hi")).vector.tolist() == [0.5, 1.0]
        sent = len(server.requests)
        assert (await client.embed(["Hi", "Ho"])).vectors.shape == (2, 2)
        assert len(server.requests) == sent + 2

    with_client(server, use)


def test_what_goes_with_any_request(server: FakeServer) -> None:
    async def use(client: AsyncClient) -> None:
        await client.generate(["Hi", "Ho"], cache_salt="a", return_perf_metrics=True)
        await client.stream("Hi", cache_salt="a", return_perf_metrics=True).result()
        await client.chat([], cache_salt="a", return_perf_metrics=True)
        await client.chat([], stream=True, cache_salt="a", return_perf_metrics=True).result()

    with_client(server, use)
    assert len(server.requests) == 5
    for request in server.requests:
        assert request.inputs["cache_salt"] == "a"
        assert request.inputs["return_perf_metrics"] is True
        assert request.sampling == {}


def test_an_unmodified_vllm_backend(server: FakeServer) -> None:
    server.inputs = dict(VLLM_INPUTS)

    async def use(client: AsyncClient) -> None:
        assert (await client.generate("Hi")).text == "Hello there"
        with pytest.raises(UnsupportedFeature) as caught:
            await client.tokenize("Hi")
        assert caught.value.field == "control"

    with_client(server, use)


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert public(Stream) == public(AsyncStream)
