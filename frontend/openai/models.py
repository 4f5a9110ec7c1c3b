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
    max_model_len: int | None                   # null while the engine starts
    object: str = "model"
    owned_by: str = "threefold"
    parent: str | None = None


class ModelList(msgspec.Struct):
    """The answer of GET /v1/models."""
    data: list[ModelCard]
    object: str = "list"


def _card(engine: EngineLike) -> ModelCard:
    name = engine.served_model_name
    return ModelCard(name, engine.created, name, engine.max_model_len or None)


async def list_models(exchange: Exchange, engine: EngineLike) -> None:
    """GET /v1/models."""
    await exchange.reply(200, msgspec.json.encode(ModelList([_card(engine)])))


async def get_model(exchange: Exchange, engine: EngineLike) -> None:
    """GET /v1/models/{model_id}; ids may contain slashes."""
    check_model(engine, exchange.scope["path_params"]["model_id"])
    await exchange.reply(200, msgspec.json.encode(_card(engine)))


async def health(exchange: Exchange, engine: EngineLike) -> None:
    """GET /health, /ping: 503 until the engine serves for the first time, and once it is dead. 200 otherwise, also
    while a process is being replaced: who watches it should not end what is about to go on."""
    status = engine.status()
    word = "dead" if status.get("dead") else "ok" if status.get("ready") or status.get("restarting") else "starting"
    await _reply_status(exchange, 200 if word == "ok" else 503, word, status)


async def ready(exchange: Exchange, engine: EngineLike) -> None:
    """GET /ready: 200 when requests are served; until then 503 and the phase of the start."""
    status = engine.status()
    is_ready = bool(status.get("ready"))
    await _reply_status(exchange, 200 if is_ready else 503, "ready" if is_ready else "not ready", status)


async def _reply_status(exchange: Exchange, code: int, word: str, status: dict[str, Any]) -> None:
    await exchange.reply(code, msgspec.json.encode({"status": word, **status}))
