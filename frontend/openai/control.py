"""Control routes, behind the admin key: pausing, sleeping, forgetting the prefix cache, dumping the flight recording.

They concern the whole engine; no request that runs is lost by any of them.
"""
from __future__ import annotations

import msgspec

from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine
from frontend.peers import Peers
from ipc.errors import RequestError


class ControlAnswer(msgspec.Struct):
    """What every control route answers with."""
    status: str
    is_paused: bool


class RecordingAnswer(msgspec.Struct):
    """Where a flight recording was written: a file of the server's machine, readable by its user alone."""
    path: str


class SleepAnswer(msgspec.Struct):
    """What the routes about sleep answer with."""
    is_sleeping: bool


async def _reply(exchange: Exchange, engine: EngineLike, status: str) -> None:
    await exchange.reply(200, msgspec.json.encode(ControlAnswer(status, engine.is_paused)))


async def reset_prefix_cache(exchange: Exchange, engine: EngineLike) -> None:
    """POST /reset_prefix_cache: nothing computed until now is reused."""
    check_engine(engine)
    await engine.reset_prefix_cache()
    await _reply(exchange, engine, "reset")


async def dump_recording(exchange: Exchange, engine: EngineLike) -> None:
    """POST /dump_recording: write the core's last messages to a file, for `launch.py replay`. It holds prompts."""
    check_engine(engine)
    try:
        path = await engine.dump_recording()
    except ValueError as error:
        raise RequestError(str(error)) from None
    await exchange.reply(200, msgspec.json.encode(RecordingAnswer(path)))


async def pause(peers: Peers | None, exchange: Exchange, engine: EngineLike) -> None:
    """POST /pause: new requests wait, also in streams, which send keep-alive comments; running ones go on."""
    engine.pause()
    if peers is not None:
        await peers.pause()
    await _reply(exchange, engine, "paused")


async def resume(peers: Peers | None, exchange: Exchange, engine: EngineLike) -> None:
    """POST /resume: the waiting requests go on."""
    engine.resume()
    if peers is not None:
        await peers.resume()
    await _reply(exchange, engine, "resumed")


async def sleep(exchange: Exchange, engine: EngineLike) -> None:
    """POST /sleep?level=1: the worker gives its memory back; requests wait, running ones go on after /wake_up."""
    check_engine(engine)
    text = exchange.query().get("level", "1")
    if text not in ("1", "2"):
        raise RequestError(f"level is {text[:40]!r}; 1 drops the pool, 2 the weights too", "level")
    try:
        await engine.sleep(int(text))
    except ValueError as error:
        raise RequestError(str(error)) from None
    await exchange.reply(200, msgspec.json.encode(SleepAnswer(True)))


async def wake_up(exchange: Exchange, engine: EngineLike) -> None:
    """POST /wake_up: answered when requests go on."""
    check_engine(engine)
    await engine.wake_up()
    await exchange.reply(200, msgspec.json.encode(SleepAnswer(False)))


async def is_sleeping(exchange: Exchange, engine: EngineLike) -> None:
    """GET /is_sleeping."""
    check_engine(engine)
    await exchange.reply(200, msgspec.json.encode(SleepAnswer(await engine.is_sleeping())))


async def get_paused(exchange: Exchange, engine: EngineLike) -> None:
    """GET /is_paused."""
    await _reply(exchange, engine, "paused" if engine.is_paused else "serving")
