"""The ASGI application: routes, the edge that turns every exception into an error body, and the counters.

Starlette's router is used without Starlette's two exception middlewares: each wraps `send`, and so costs something for
every token of every stream. The edge here does their work and leaves `send` bare.
"""
from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from frontend.openai import models
from frontend.openai.chat import create_chat_completion
from frontend.openai.completions import create_completion
from frontend.openai.engine import EngineLike as EngineLike
from frontend.openai.errors import ClientDisconnectedError, MethodNotAllowedError, RouteNotFoundError, describe
from frontend.openai.exchange import Exchange
from frontend.openai.limits import Limits
from ipc.errors import EngineDeadError

logger = logging.getLogger(__name__)

Handler = Callable[[Exchange, EngineLike], Awaitable[None]]


@dataclasses.dataclass(slots=True)
class Counters:
    """What happened at the HTTP edge since the start; read by the metrics."""
    num_requests: int = 0
    num_active: int = 0
    num_client_disconnects: int = 0             # each one aborted its request
    num_client_errors: int = 0                  # 4xx
    num_server_errors: int = 0                  # 5xx, and errors inside a started stream


class Endpoint:
    """A handler as an ASGI application, which is how the router leaves receive and send alone."""

    def __init__(self, handler: Handler, engine: EngineLike) -> None:
        self._handler = handler
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["exchange"], self._engine)


class OpenAIApp:
    """The application. `state.counters` and `state.engine` are for metrics and tests."""

    def __init__(self, engine: EngineLike, routes: list[Route], limits: Limits) -> None:
        self.state = State()
        self.state.engine = engine
        self.state.counters = Counters()
        self.limits = limits
        self.router = Router(routes, redirect_slashes=False)
        self._counters: Counters = self.state.counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every failure becomes one error body, in or before the stream."""
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope["app"] = self                             # the router then raises HTTPException for 404 and 405
        exchange = scope["exchange"] = Exchange(scope, receive, send, self.limits)
        self._counters.num_requests += 1
        self._counters.num_active += 1
        try:
            exchange.check_headers()
            await self.router(scope, receive, send)
        except ClientDisconnectedError:
            self._counters.num_client_disconnects += 1
            logger.info("%s: client disconnected after %.2f s; %s %s is aborted", exchange.request_id,
                        exchange.elapsed_s(), scope["method"], scope["path"])
        except asyncio.CancelledError:
            await self._fail(exchange, EngineDeadError("the server is shutting down"))
            raise
        except HTTPException as exc:
            await self._fail(exchange, _routing_error(exc, scope))
        except Exception as exc:                        # the edge: whatever it is, the caller gets one error body
            await self._fail(exchange, exc)
        finally:
            self._counters.num_active -= 1

    async def _fail(self, exchange: Exchange, exc: BaseException) -> None:
        if describe(exc).status < 500:
            self._counters.num_client_errors += 1
        else:
            self._counters.num_server_errors += 1
        await exchange.fail(exc)


def _routing_error(exc: HTTPException, scope: Scope) -> Exception:
    method, path = scope["method"], scope["path"][:200]
    if exc.status_code == 405:
        allow = (exc.headers or {}).get("Allow", "")
        return MethodNotAllowedError(f"{method} is not allowed for {path}; allowed: {allow}", allow)
    return RouteNotFoundError(f"there is no {method} {path} here; the API is under /v1")


def build_app(engine: EngineLike, *, version: str = "0.1.0", limits: Limits | None = None,
              extra_routes: list[Route] | None = None) -> OpenAIApp:
    """The application for one engine, which may still be starting."""
    version_body = msgspec.json.encode({"version": version})

    async def get_version(exchange: Exchange, _: EngineLike) -> None:
        await exchange.reply(200, version_body)

    table: list[tuple[list[str], str, Handler]] = [
        (["POST"], "/v1/chat/completions", create_chat_completion),
        (["POST"], "/v1/completions", create_completion),
        (["GET"], "/v1/models", models.list_models),
        (["GET"], "/v1/models/{model_id:path}", models.get_model),
        (["GET"], "/health", models.health),
        (["GET", "POST"], "/ping", models.health),
        (["GET"], "/ready", models.ready),
        (["GET"], "/version", get_version),
    ]
    routes = [Route(path, Endpoint(handler, engine), methods=methods) for methods, path, handler in table]
    return OpenAIApp(engine, routes + (extra_routes or []), limits or Limits())
