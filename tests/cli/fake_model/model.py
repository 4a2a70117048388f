"""A model without an engine: it streams fixed words, and fails when its model.json says so."""

import json
import os
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(folder, "model.json")) as file:
            self.settings = json.load(file)
        self.go_on = os.path.join(folder, "go_on")  # what is asked slowly waits for this file
        self.threads: list[threading.Thread] = []
        self.tell(event="begin", phase="weights")
        self.tell(event="progress", phase="weights", done=1, total=2)
        time.sleep(self.settings.get("load_seconds", 0))
        error = self.settings.get("load_error")
        if error is not None:
            if self.settings.get("tell_error"):
                self.tell(event="error", text=error)
            raise pb_utils.TritonModelException(error)
        self.tell(event="end", phase="weights", seconds=0.25)
        self.tell(event="settings", text="dtype=float32")
        self.tell(event="warning", text="swap_space does not apply")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy()[0] for tensor in request.inputs()}
            thread = threading.Thread(
                target=self.answer, args=(request.get_response_sender(), inputs)
            )
            self.threads.append(thread)
            thread.start()

    def finalize(self) -> None:
        for thread in self.threads:
            thread.join()

    def answer(self, sender: Any, inputs: dict[str, bytes]) -> None:
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if inputs.get("text_input") == b"fail the engine":
            self.tell(event="error", text="the engine stopped computing")
        if "chat" in inputs and self.settings.get("chat_error"):
            error = pb_utils.TritonError(self.settings["chat_error"])
            sender.send(pb_utils.InferenceResponse([], error=error), flags=final)
            return
        slow = inputs.get("text_input") == b"slow"
        words = ["It ", "is ", "Paris", "."]
        for index, word in enumerate(words):
            while slow and index and not os.path.exists(self.go_on):
                time.sleep(0.01)
            tensor = pb_utils.Tensor("text_output", np.array([word.encode()], dtype=np.object_))
            flags = final if index == len(words) - 1 else 0
            sender.send(pb_utils.InferenceResponse([tensor]), flags=flags)

    def tell(self, **event: object) -> None:
        with open(os.environ["TRIDENT_PROGRESS"], "a") as file:
            file.write(json.dumps(event) + "\n")
