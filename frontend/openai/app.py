"""The ASGI application: routes, the edge that turns every exception into an error body, and the counters.

Starlette's router is used without Starlette's two exception middlewares: each wraps `send`, and so costs something for
every token of every stream. The edge here does their work and leaves `send` bare.
"""
from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Sequence

import msgspec
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import Receive, Scope, Send

from frontend.openai import anthropic, control, models, pages, responses, tokenize
from frontend.openai.answers import ChatResponse, CompletionResponse
from frontend.openai.auth import Access, Keys
from frontend.openai.chat import create_chat_completion
from frontend.openai.completions import create_completion
from frontend.openai.cors import Cors
from frontend.openai.embeddings import EmbeddingRequest, EmbeddingResponse, create_embeddings
from frontend.openai.engine import EngineLike as EngineLike
from frontend.openai.errors import ClientDisconnectedError, MethodNotAllowedError, RouteNotFoundError, describe
from frontend.openai.exchange import Exchange
from frontend.openai.limits import Limits
from frontend.openai.openapi import openapi_handler
from frontend.openai.protocol import ChatRequest, CompletionRequest
from frontend.openai.response_store import ResponseStore
from frontend.openai.routes import Row, make_route
from frontend.openai.shared_responses import SharedResponses
from frontend.peers import Peers
from frontend.request_context import CURRENT
from ipc import VERSION
from ipc.config import FrontendSection
from ipc.errors import EngineDeadError

logger = logging.getLogger(__name__)

METHODS = ("GET", "HEAD", "POST", "DELETE")


@dataclasses.dataclass(slots=True)
class Counters:
    """What happened at the HTTP edge since the start; read by the metrics."""
    num_requests: int = 0
    num_active: int = 0
    num_client_disconnects: int = 0             # each one aborted its request
    num_client_errors: int = 0                  # 4xx
    num_server_errors: int = 0                  # 5xx, and errors inside a started stream


class VersionAnswer(msgspec.Struct):
    """The answer of GET /version."""
    version: str


class LoadAnswer(msgspec.Struct):
    """The answer of GET /load. `server_load`, vLLM's name: HTTP requests being served, this one not counted."""
    server_load: int
    num_running: int
    num_waiting: int
    is_paused: bool


class OpenAIApp:
    """The application. `state.counters` and `state.engine` are for metrics and tests."""

    def __init__(self, engine: EngineLike, routes: list[Route], limits: Limits, counters: Counters,
                 cors: Cors, returns_timings: bool = False) -> None:
        self.state = State()
        self.state.engine = engine
        self.state.counters = counters
        self.limits = limits
        self.router = Router(routes, redirect_slashes=False)
        self._counters = counters
        self._cors = cors
        self._returns_timings = returns_timings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every failure becomes one error body, in or before the stream."""
        if scope["type"] != "http":
            await self.router(scope, receive, send)
            return
        scope["app"] = self                             # the router then raises HTTPException for 404 and 405
        exchange = scope["exchange"] = Exchange(scope, receive, send, self.limits)
        exchange.returns_timings = self._returns_timings
        self._counters.num_requests += 1
        self._counters.num_active += 1
        context = CURRENT.set(exchange.context())
        try:
            exchange.check_headers()
            is_allowed = self._cors.apply(exchange)
            if self._cors.is_preflight(exchange):
                await self._cors.answer_preflight(exchange, is_allowed)
            elif scope["method"] == "OPTIONS":
                await exchange.reply_empty([(b"allow", self._allowed(scope).encode())])
            else:
                await self.router(scope, receive, send)
        except ClientDisconnectedError:
            self._counters.num_client_disconnects += 1
            logger.info("%s: client disconnected after %.2f s; %s %s is aborted", exchange.request_id,
                        exchange.elapsed_s(), scope["method"], scope["path"])
        except asyncio.CancelledError:
            await self._fail(exchange, EngineDeadError("the server is shutting down"))
            raise
        except HTTPException as exc:
            await self._fail(exchange, self._routing_error(exc, scope))
        except Exception as exc:                        # the edge: whatever it is, the caller gets one error body
            await self._fail(exchange, exc)
        finally:
            CURRENT.reset(context)
            self._counters.num_active -= 1

    def _allowed(self, scope: Scope) -> str:
        """The methods of a path; of `*` those of the server. Raises RouteNotFoundError."""
        routes = [route for route in self.router.routes if isinstance(route, Route)]
        if scope["path"] != "*":
            routes = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
            if not routes:
                raise _no_route(scope)
        methods = {method for route in routes for method in route.methods or ()}
        return ", ".join([method for method in METHODS if method in methods] + ["OPTIONS"])

    def _routing_error(self, exc: HTTPException, scope: Scope) -> Exception:
        if exc.status_code != 405:
            return _no_route(scope)
        allow = self._allowed(scope)
        return MethodNotAllowedError(f"{scope['method']} is not allowed for {scope['path'][:200]}; allowed: {allow}",
                                     allow)

    async def _fail(self, exchange: Exchange, exc: BaseException) -> None:
        if describe(exc).status < 500:
            self._counters.num_client_errors += 1
        else:
            self._counters.num_server_errors += 1
        await exchange.fail(exc)


def _no_route(scope: Scope) -> RouteNotFoundError:
    return RouteNotFoundError(f"there is no {scope['method']} {scope['path'][:200]} here; the API is under /v1")


def build_app(engine: EngineLike, *, version: str = VERSION, limits: Limits | None = None,
              extra_rows: Sequence[Row] = (), section: FrontendSection | None = None,
              peers: Peers | None = None) -> OpenAIApp:
    """The application for one engine, which may still be starting. `section`: who may call it; `peers`: the other
    processes that serve the same port."""
    section = section or FrontendSection()
    keys = Keys(section.api_keys, section.admin_api_keys, section.share_prefix_cache)
    counters = Counters()
    rows = [*api_rows(version, counters, peers), *extra_rows]
    rows.append(Row(("GET",), "/openapi.json", openapi_handler(rows, version), "this API, described"))
    return OpenAIApp(engine, [make_route(row, engine, keys) for row in rows], limits or Limits(), counters,
                     Cors(section), section.return_timings)


def api_rows(version: str, counters: Counters, peers: Peers | None = None) -> list[Row]:
    """Every route but /openapi.json, which describes them."""
    version_body = msgspec.json.encode(VersionAnswer(version))
    shared = SharedResponses(ResponseStore(), peers)

    async def get_version(exchange: Exchange, _: EngineLike) -> None:
        await exchange.reply(200, version_body)

    async def get_load(exchange: Exchange, engine: EngineLike) -> None:
        status = engine.status()
        await exchange.reply(200, msgspec.json.encode(LoadAnswer(
            counters.num_active - 1, status.get("num_running", 0), status.get("num_waiting", 0), engine.is_paused)))

    get, post, opened, admin = ("GET",), ("POST",), Access.OPEN, Access.ADMIN
    return [
        Row(post, "/v1/chat/completions", create_chat_completion, "answer a conversation", request=ChatRequest,
            answer=ChatResponse, streams=True),
        Row(post, "/v1/completions", create_completion, "continue a text", request=CompletionRequest,
            answer=CompletionResponse, streams=True),
        Row(post, "/v1/embeddings", create_embeddings, "texts to vectors", request=EmbeddingRequest,
            answer=EmbeddingResponse),
        *responses.rows(shared),
        *anthropic.rows(),
        Row(get, "/v1/models", models.list_models, "the served model", answer=models.ModelList),
        Row(get, "/v1/models/{model_id:path}", models.get_model, "one model", answer=models.ModelCard),
        Row(post, "/tokenize", tokenize.tokenize, "text or a conversation to token ids",
            request=tokenize.TokenizeRequest, answer=tokenize.TokenizeAnswer),
        Row(post, "/detokenize", tokenize.detokenize, "token ids to text", request=tokenize.DetokenizeRequest,
            answer=tokenize.DetokenizeAnswer),
        Row(get, "/health", models.health, "200 once it has served, 503 when it is dead", opened),
        Row(("GET", "POST"), "/ping", models.health, "the same", opened),
        Row(get, "/ready", models.ready, "200 when requests are served", opened),
        Row(get, "/version", get_version, "of this server", answer=VersionAnswer),
        Row(get, "/load", get_load, "requests now", answer=LoadAnswer),
        Row(post, "/reset_prefix_cache", control.reset_prefix_cache, "reuse nothing computed until now", admin,
            answer=control.ControlAnswer),
        Row(post, "/dump_recording", control.dump_recording, "write the core's last messages to a file", admin,
            answer=control.RecordingAnswer),
        Row(post, "/pause", functools.partial(control.pause, peers), "let new requests wait", admin,
            answer=control.ControlAnswer),
        Row(post, "/resume", functools.partial(control.resume, peers), "let them go on", admin,
            answer=control.ControlAnswer),
        Row(post, "/sleep", control.sleep, "give the worker's memory back", admin, answer=control.SleepAnswer),
        Row(post, "/wake_up", control.wake_up, "take it again", admin, answer=control.SleepAnswer),
        Row(get, "/is_sleeping", control.is_sleeping, "whether it is given back", admin, answer=control.SleepAnswer),
        Row(get, "/is_paused", control.get_paused, "whether new requests wait", admin, answer=control.ControlAnswer),
        Row(get, "/", pages.page("index.html"), "chat in a browser", opened),
        Row(get, "/timeline", pages.page("timeline.html"), "steps, pool and queue, live", opened),
        Row(get, "/docs", pages.page("docs.html"), "this API, to read", opened),
    ]
