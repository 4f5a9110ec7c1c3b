"""Which web pages from elsewhere may call this server (CORS). None, unless --allowed-origins names them.

Adds headers to every answer for such a page, and answers its browser's preflight questions, which carry no key.
"""
from __future__ import annotations

from frontend.openai.exchange import Exchange
from ipc.config import FrontendSection

DEFAULT_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
EXPOSED = b"x-request-id, request-id, x-ignored-fields, retry-after"
PREFLIGHT_AGE_S = b"600"


class Cors:
    """The rules of one server."""

    def __init__(self, section: FrontendSection) -> None:
        self._origins = frozenset(origin.rstrip("/").encode() for origin in section.allowed_origins)
        methods = DEFAULT_METHODS if "*" in section.allowed_methods else section.allowed_methods
        self._methods = ", ".join(methods).encode()
        self._headers = None if "*" in section.allowed_headers else ", ".join(section.allowed_headers).encode()
        self._credentials = section.allow_credentials

    def apply(self, exchange: Exchange) -> bool:
        """Adds the headers that a page of an allowed origin needs; whether there is such a page."""
        origin = exchange.header(b"origin")
        if not self._origins or origin is None:
            return False
        exchange.headers.append((b"vary", b"origin"))
        if b"*" not in self._origins and origin not in self._origins:
            return False
        exchange.headers += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED)]
        if self._credentials:
            exchange.headers.append((b"access-control-allow-credentials", b"true"))
        return True

    def is_preflight(self, exchange: Exchange) -> bool:
        """A browser asks before it sends the page's request."""
        return (exchange.scope["method"] == "OPTIONS" and exchange.header(b"origin") is not None
                and exchange.header(b"access-control-request-method") is not None)

    async def answer_preflight(self, exchange: Exchange, is_allowed: bool) -> None:
        """204 with what is allowed; without these headers the browser refuses by itself."""
        if is_allowed:
            asked = exchange.header(b"access-control-request-headers") or b"authorization, content-type"
            exchange.headers += [(b"access-control-allow-methods", self._methods),
                                 (b"access-control-allow-headers", self._headers or asked),
                                 (b"access-control-max-age", PREFLIGHT_AGE_S)]
        await exchange.reply_empty([])
