from trident_llm.serving.embedding_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
