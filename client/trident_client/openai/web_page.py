"""The page at ``/``: its files, and the headers that keep it to itself.

The page asks this gateway only, runs no script but its own, and shows nothing without the key that the
gateway asks for; so its files may be had without one. Everything is read at start: a request can name
no path on the disk.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from trident_client.openai.gateway import Gateway
from trident_client.openai.http import JSONAnswer, json_bytes, until_gone

__all__ = ["WebPage", "stats"]

FOLDER = Path(__file__).parent / "page"
CONFIG = "/page/config.json"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_STATS_SECONDS = 5.0


class WebPage:
    """The files by their paths. ``needs_key`` is what the page is told of the gateway."""

    def __init__(self, *, needs_key: bool) -> None:
        self._files = {
            f"/page/{path.name}": (path.read_bytes(), _TYPES[path.suffix])
            for path in FOLDER.iterdir()
            if path.suffix in _TYPES
        }
        self._files["/"] = self._files.pop("/page/index.html")
        self._files[CONFIG] = (json_bytes({"needs_key": needs_key}), "application/json")

    @property
    def paths(self) -> frozenset[str]:
        """What the page consists of."""
        return frozenset(self._files)

    async def serve(self, request: Request) -> Response:
        """The file at the request's path, which is one of `paths`."""
        content, media_type = self._files[request.scope["path"]]
        return Response(content, headers={**_HEADERS, "Content-Type": media_type})


async def stats(gateway: Gateway, request: Request) -> Response:
    """``GET /stats?model=NAME``: the engine's blocks, requests and steps, without any text of them."""
    _, client = gateway.client(request.query_params.get("model"))
    work = client.control({"op": "stats", "detail": True}, timeout=_STATS_SECONDS)
    return JSONAnswer(await until_gone(request, work))
