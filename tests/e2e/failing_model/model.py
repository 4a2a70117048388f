"""The engine's model with faults: each is switched on by a file beside its model.json.

``broken``: the device is gone. ``hanging``: it answers no more. ``nan``: one row is not finite.
``once``: one step fails. ``slow``: a step takes 0.1 s, so a request of many tokens is there for long.
``unsendable``: a response and its final flag cannot be sent.
"""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trident_llm.serving import model


def _gone(output: Any) -> Any:
    raise RuntimeError("the device is gone")


class _Unsendable:
    """A response sender whose server takes nothing."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("no shared memory")

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class TritonPythonModel(model.TritonPythonModel):
    def execute(self, requests: list[Any]) -> None:
        executor = self._engine._executor
        launch, collect = type(executor).launch, type(executor).collect
        if self._has("broken"):
            executor.launch = _gone  # type: ignore[method-assign]
        if self._has("hanging"):
            executor.collect = lambda launched: threading.Event().wait()  # type: ignore
        if self._takes("slow"):

            def late(launched: Any) -> Any:
                time.sleep(0.1)
                return collect(executor, launched)

            executor.collect = late  # type: ignore[method-assign]
        if self._takes("once"):

            def fail(*args: Any) -> Any:
                executor.launch = lambda *args: launch(executor, *args)  # type: ignore
                raise RuntimeError("one bad step")

            executor.launch = fail  # type: ignore[method-assign]
        if self._takes("nan"):

            def spoil(launched: Any) -> Any:
                result = collect(executor, launched)
                if not result.sampled:
                    return result
                executor.collect = lambda *args: collect(executor, *args)  # type: ignore
                first, *others = result.sampled
                return replace(result, sampled=[replace(first, failed=True), *others])

            executor.collect = spoil  # type: ignore[method-assign]
        super().execute(requests)
        if self._takes("unsendable"):
            for handle in self._responder._open_handles():
                handle.sender = _Unsendable(handle.sender)

    def _has(self, fault: str) -> bool:
        return (Path(__file__).parent / fault).exists()

    def _takes(self, fault: str) -> bool:
        """Whether the fault is switched on; it is off then."""
        found = self._has(fault)
        (Path(__file__).parent / fault).unlink(missing_ok=True)
        return found
