"""Trident: an LLM inference engine that runs inside Triton server."""

__version__ = "0.1.0"
