"""The small read-only routes: models, health, readiness, version."""
from __future__ import annotations

from typing import Any

import msgspec

from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_model


class ModelCard(msgspec.Struct):
    """One served model, in OpenAI's shape with vLLM's max_model_len."""
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "threefold"
    parent: str | None = None


class ModelList(msgspec.Struct):
    """The answer of GET /v1/models."""
    data: list[ModelCard]
    object: str = "list"


def _card(engine: EngineLike) -> ModelCard:
    name = engine.served_model_name
    return ModelCard(name, engine.created, name, engine.max_model_len)


async def list_models(exchange: Exchange, engine: EngineLike) -> None:
    """GET /v1/models."""
    await exchange.reply(200, msgspec.json.encode(ModelList([_card(engine)])))


async def get_model(exchange: Exchange, engine: EngineLike) -> None:
    """GET /v1/models/{model_id}; ids may contain slashes."""
    check_model(engine, exchange.scope["path_params"]["model_id"])
    await exchange.reply(200, msgspec.json.encode(_card(engine)))


async def health(exchange: Exchange, engine: EngineLike) -> None:
    """GET /health, /ping: 200 while starting or serving, 503 once the engine is dead."""
    status = engine.status()
    is_dead = bool(status.get("dead"))
    await _reply_status(exchange, 503 if is_dead else 200, "dead" if is_dead else "ok", status)


async def ready(exchange: Exchange, engine: EngineLike) -> None:
    """GET /ready: 200 when requests are served; until then 503 and the phase of the start."""
    status = engine.status()
    is_ready = bool(status.get("ready"))
    await _reply_status(exchange, 200 if is_ready else 503, "ready" if is_ready else "not ready", status)


async def _reply_status(exchange: Exchange, code: int, word: str, status: dict[str, Any]) -> None:
    await exchange.reply(code, msgspec.json.encode({"status": word, **status}))
