"""What cannot be repaired in the server: it is told, and the server is started anew."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.command import Serve, processes_of_group_of, wait_for
from tests.e2e.models import without_end
from tests.e2e.server import RunningServer
from trident_client import ServerError, TridentError
from trident_llm.cli.repository import write_repository

pytestmark = pytest.mark.e2e


GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def failing_repository(folder: Path, model: Path, **settings: object) -> Path:
    """A repository whose model has the faults of ``failing_model``; its version folder."""
    values = {"model": str(model), "dtype": "float32", "num_blocks": 40, **settings}
    write_repository(folder / "models", "llm", values)
    version = folder / "models" / "llm" / "1"
    shutil.copy(Path(__file__).parent / "failing_model" / "model.py", version)
    return version


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_an_engine_that_died_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    version = failing_repository(tmp_path, tiny_model)
    with RunningServer(
        tmp_path, f"--model-repository={tmp_path / 'models'}", "--no-self-check"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", max_tokens=4, temperature=0, ignore_eos=True).text
        (version / "broken").touch()
        for _ in range(3):  # as many as it takes to give up
            with pytest.raises(ServerError) as caught:
                client.generate("hello", max_tokens=4)
            assert caught.value.code == "INTERNAL"
            (version / "broken").unlink(missing_ok=True)  # of the next server, the device is whole
        wait_for(lambda: "ready again after" in server.log, "the server is restarted")
        assert "error: the engine has failed and computes nothing" in server.log
        again = client.generate("hello", max_tokens=4, temperature=0, ignore_eos=True)
        assert again.text == expected
        assert server.idle_stats()["num_requests"] == 0


def test_a_bad_step_and_a_bad_row_take_only_their_own_request(
    tmp_path: Path, tiny_model: Path
) -> None:
    version = failing_repository(tmp_path, tiny_model)
    with RunningServer(
        tmp_path, f"--model-repository={tmp_path / 'models'}", "--no-self-check"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", **GREEDY).text
        for fault, said in (("once", "a step failed"), ("nan", "was not finite")):
            (version / fault).touch()
            with pytest.raises(ServerError, match=said) as caught:
                client.generate("hello", **GREEDY)
            assert caught.value.code == "INTERNAL"
            assert client.generate("hello", **GREEDY).text == expected
        assert "restarting" not in server.log
        assert server.idle_stats()["num_requests"] == 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hanging", "error: the engine has made no progress for 3 s"),
        ("unsendable", "error: the end of a request could not be told to the server"),
    ],
)
def test_what_cannot_go_on_is_restarted(
    tmp_path: Path, tiny_model: Path, fault: str, told: str
) -> None:
    version = failing_repository(tmp_path, tiny_model, watchdog_seconds=3)
    with RunningServer(
        tmp_path, f"--model-repository={tmp_path / 'models'}", "--no-self-check"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", **GREEDY).text
        (version / fault).touch()
        if fault == "hanging":
            with pytest.raises(ServerError, match="made no progress") as caught:
                client.generate("hello", **GREEDY)
            assert caught.value.code == "INTERNAL"
            (version / fault).unlink()
        else:
            stream = client.stream("hello", **GREEDY)  # nothing will ever come of it
        wait_for(lambda: "ready again after" in server.log, "the server is restarted")
        assert told in server.log
        if fault != "hanging":
            with pytest.raises(TridentError):
                stream.result()
        assert client.generate("hello", **GREEDY).text == expected
        assert server.idle_stats()["num_requests"] == 0


def test_a_killed_stub_is_replaced_and_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    before = shared_memory()
    model = without_end(tiny_model, tmp_path / "model")
    with RunningServer(
        tmp_path, f"--model={model}", "--dtype=float32", "--no-self-check", "--num-blocks=4001"
    ) as server, server.client(retries=0) as client:  # fmt: skip
        expected = client.generate("hello", **GREEDY).text
        grammar = {"structured_outputs": {"regex": "a+"}, "max_tokens": 3}
        assert set(client.generate("hello", **grammar).text) <= {"a"}
        old = processes_of_group_of(server._serve.server())
        assert len(old) >= 2
        stream = client.stream("hello", max_tokens=50_000, ignore_eos=True)
        next(stream)
        os.kill(server._serve.stub(), signal.SIGKILL)
        with pytest.raises(TridentError):
            stream.result()
        wait_for(lambda: "ready again after" in server.log, "the server is restarted")
        # Now and then the server itself does not survive that a model dies while it is sending.
        told = ("the process that runs the model has died", "the server ended by itself")
        assert any(text in server.log for text in told)
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in old), "no orphan")
        assert client.generate("hello", **GREEDY).text == expected
    assert shared_memory() <= before


def test_a_truncated_file_of_weights_fails_the_load_in_one_sentence(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with Serve(tmp_path, f"--model={model}", "--no-self-check") as serve:
        assert serve.wait_for_end() == 1
        last = serve.err.splitlines()[-1]
        assert last.startswith("error: ") and weights.name in last
        assert "Traceback" not in serve.err
        assert serve.left_behind() == []


def state(pid: int) -> str:
    """As /proc has it: Z of a process that has ended, X where nothing is left of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_a_killed_grammar_worker_takes_only_the_request_it_worked_for(
    tiny_server: RunningServer,
) -> None:
    serve = tiny_server._serve

    def ask(pattern: str) -> str:
        with tiny_server.client(retries=0) as client:
            sampling = {"structured_outputs": {"regex": pattern}, "max_tokens": 3}
            return client.generate("x", temperature=0, **sampling).text

    def worker() -> int:
        (pid,) = serve.children(serve.stub())
        return pid

    assert set(ask("a+")) == {"a"}
    idle = worker()
    os.kill(idle, signal.SIGKILL)
    wait_for(lambda: state(idle) in "ZX", "it is dead")
    assert set(ask("b+")) == {"b"}
    busy = worker()
    assert busy != idle
    # Each grammar is tried in a child, which is held where it is, so that the worker is busy indeed.
    for number in range(100):
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, f"(a|b){{1,{200 + number}}}c")
            wait_for(lambda: serve.children(busy) or answer.done(), "it is compiled")  # noqa: B023
            with contextlib.suppress(ProcessLookupError):
                for child in serve.children(busy):
                    os.kill(child, signal.SIGSTOP)
            if answer.done() or not serve.children(busy):
                continue  # that was too quick to be held
            os.kill(busy, signal.SIGKILL)
            with pytest.raises(ServerError) as caught:
                answer.result()
            assert caught.value.code == "INTERNAL"
            break
    else:
        raise AssertionError("no compilation could be held")
    assert set(ask("c+")) == {"c"}
    assert worker() not in (idle, busy)
    tiny_server.idle_stats()
