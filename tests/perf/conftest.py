"""The server that the load tools are tried on is the one of the end-to-end tests."""

from tests.e2e.conftest import tiny_server

__all__ = ["tiny_server"]
