"""The id under which the server knows a request: in its logs, traces and errors.

>>> from trident_client import request_id
>>> token = request_id.set("order-17")
>>> client.generate("Hello").request_id
'order-17'
>>> request_id.reset(token)
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["request_id"]

request_id: ContextVar[str | None] = ContextVar("trident_request_id", default=None)
"""The id of the requests that are made from here on in this context; without one each gets its own."""
