"""The engine's model with a device that goes when its model.json's neighbour ``broken`` is there."""

from pathlib import Path
from typing import Any

from trident_llm.serving import model


def _gone(output: Any) -> Any:
    raise RuntimeError("the device is gone")


class TritonPythonModel(model.TritonPythonModel):
    def execute(self, requests: list[Any]) -> None:
        if (Path(__file__).parent / "broken").exists():
            self._engine._executor.launch = _gone  # type: ignore[method-assign]
        super().execute(requests)
