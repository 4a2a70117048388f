from trident_llm.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
