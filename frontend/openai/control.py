"""Control routes, behind the admin key: pausing, and forgetting the prefix cache.

They concern this frontend and its engine; nothing here touches a request that runs.
"""
from __future__ import annotations

import msgspec

from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine
from frontend.peers import Peers


class ControlAnswer(msgspec.Struct):
    """What every control route answers with."""
    status: str
    is_paused: bool


async def _reply(exchange: Exchange, engine: EngineLike, status: str) -> None:
    await exchange.reply(200, msgspec.json.encode(ControlAnswer(status, engine.is_paused)))


async def reset_prefix_cache(exchange: Exchange, engine: EngineLike) -> None:
    """POST /reset_prefix_cache: nothing computed until now is reused."""
    check_engine(engine)
    await engine.reset_prefix_cache()
    await _reply(exchange, engine, "reset")


async def pause(peers: Peers | None, exchange: Exchange, engine: EngineLike) -> None:
    """POST /pause: new requests wait, also in streams, which send keep-alive comments; running ones go on."""
    engine.pause()
    if peers is not None:
        await peers.ask("pause")
    await _reply(exchange, engine, "paused")


async def resume(peers: Peers | None, exchange: Exchange, engine: EngineLike) -> None:
    """POST /resume: the waiting requests go on."""
    engine.resume()
    if peers is not None:
        await peers.ask("resume")
    await _reply(exchange, engine, "resumed")


async def get_paused(exchange: Exchange, engine: EngineLike) -> None:
    """GET /is_paused."""
    await _reply(exchange, engine, "paused" if engine.is_paused else "serving")
