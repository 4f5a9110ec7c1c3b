"""The table of routes: what is served where, for whom, and with which bodies. Router and OpenAPI file come from it.

A handler is reached only through `Endpoint`, which asks for the key first: a route that says nothing needs one.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from frontend.openai.auth import Access, Keys
from frontend.openai.dialect import OPENAI, Dialect
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange

Handler = Callable[[Exchange, EngineLike], Awaitable[None]]


class Row(NamedTuple):
    """One route. `request` and `answer` are the structs of its JSON bodies, where it has such."""
    methods: tuple[str, ...]
    path: str
    handler: Handler
    summary: str
    access: Access = Access.KEY
    request: Any = None
    answer: Any = None
    streams: bool = False                       # also answers with server-sent events
    dialect: Dialect = OPENAI


class Endpoint:
    """A handler as an ASGI application, which is how the router leaves receive and send alone."""

    def __init__(self, row: Row, engine: EngineLike, keys: Keys) -> None:
        self.row = row
        self._engine = engine
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        exchange.dialect = self.row.dialect
        self._keys.admit(exchange, self.row.access)
        await self.row.handler(exchange, self._engine)


def make_route(row: Row, engine: EngineLike, keys: Keys) -> Route:
    """The row for Starlette's router."""
    return Route(row.path, Endpoint(row, engine, keys), methods=list(row.methods))
