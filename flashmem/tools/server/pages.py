"""Requests of strange web pages are refused: any page in a browser can send some to a server on the same machine."""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from flashmem.tools.server.protocol import problem

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/?#]+)(?::[0-9]+)?", re.IGNORECASE)
"""The field of a request: a name, or an address, and a port (RFC 3986)."""

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class OwnPages:
    """Passes on a request unless its fields say that it comes from another web page, or that its body is no JSON.

    `Sec-Fetch-Site` and `Origin` are set by browsers, and no page can change them (https://www.w3.org/TR/fetch-metadata/, and
    https://fetch.spec.whatwg.org/#origin-header). A page that names this machine by a name of its own says so in `Host`; at a
    loopback address only names of this machine are right. A body of JSON is one that a browser asks about first.
    """

    def __init__(self, app: ASGIApp, address: str) -> None:
        self._app = app
        self._names = _names_of(address)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refused = self._refusal(Headers(scope=scope), scope["method"])
        if refused is None:
            await self._app(scope, receive, send)
        else:
            status, why = refused
            await JSONResponse(problem(why, status), status)(scope, receive, send)

    def _refusal(self, fields: Headers, method: str) -> tuple[int, str] | None:
        """The status and the message of a refusal; None for a request that is passed on."""
        host, origin, site = (fields.get(name) for name in ("host", "origin", "sec-fetch-site"))
        found = _HOST.fullmatch(host or "")
        if self._names and (found is None or found[1].lower() not in self._names):
            return 400, f"the request names another host; here are {', '.join(self._names)}"
        foreign = site not in ("same-origin", "none") if site else origin is not None and origin.partition("://")[2] != host
        if foreign:
            return 403, "a request of another web page is refused"
        if method == "POST" and fields.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return 415, "the body must be JSON, with the field Content-Type: application/json"
        return None


def _names_of(address: str) -> tuple[str, ...]:
    """The names of a server at `address` that are right; none if any may be, because others reach it."""
    if not ipaddress.ip_address(address).is_loopback:
        return ()
    return tuple(dict.fromkeys([*_LOOPBACK, f"[{address}]" if ":" in address else address]))
