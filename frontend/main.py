"""The HTTP frontend process: attach to the core, serve on the socket that the supervisor bound.

Started by the supervisor as `python -m frontend.main`. One asyncio loop on uvloop.
"""
from __future__ import annotations

import asyncio
import logging
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import uvloop

from frontend.async_llm import AsyncLLM
from frontend.http_server import HttpServer, socket_from_fd
from frontend.metrics import Metrics
from frontend.openai.app import build_app
from frontend.openai.debug import debug_rows
from frontend.peers import Answer, Peers
from frontend.tracing import RequestTracer
from ipc.config import SAFE_KEY_CHARS, FrontendProcess
from ipc.errors import ConfigError, EngineDeadError
from ipc.lifeline import ChildLife
from ipc.messages import ConfigFrontend, PeerDown, PeerUp, Shutdown
from ipc.process import configure_logging
from ipc.progress import Progress
from ipc.system import allow_descriptors

logger = logging.getLogger("frontend")

OWN_DESCRIPTORS = 128                           # sockets, pipes and files besides connections


async def serve(config: FrontendProcess, life: ChildLife) -> None:
    """Listen at once (/ready tells the phase), become ready with the engine, stop on Shutdown."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[Shutdown] = loop.create_future()
    parent = os.getppid()
    peers: list[PeerDown | PeerUp] = []
    llm: AsyncLLM | None = None
    progress = Progress(config.run_dir, f"frontend-{config.rank}")

    def beat() -> None:
        progress.working()
        loop.call_later(1.0, beat)

    def on_lifeline() -> None:
        for message in life.receive():
            if isinstance(message, Shutdown) and not stopping.done():
                stopping.set_result(message)
            elif isinstance(message, (PeerDown, PeerUp)):
                peers.append(message)
                if llm is not None:
                    llm.on_peer(peers.pop())
        if life.lifeline.is_closed:
            life.exit_orphaned()

    def on_signal() -> None:
        if os.getppid() != parent:              # the kernel says that our supervisor died
            life.exit_orphaned()
        if not stopping.done():
            stopping.set_result(Shutdown("the server was told to stop by SIGTERM"))

    loop.add_reader(life.lifeline.fileno(), on_lifeline)
    on_lifeline()
    loop.add_signal_handler(signal.SIGTERM, on_signal)
    beat()
    llm = await AsyncLLM.attach(config.core, config.number, config.model, config.frontend.served_model_name, wait=False)
    llm.watch_progress(config.run_dir)
    for news in peers:
        llm.on_peer(news)
    section = config.frontend
    allowed = allow_descriptors(section.max_connections + OWN_DESCRIPTORS)
    if allowed < section.max_connections + OWN_DESCRIPTORS:
        logger.warning("%d open files are allowed, so fewer than --max-connections %d; raise ulimit -n", allowed,
                       section.max_connections)
    if any(len(key) < SAFE_KEY_CHARS for key in section.api_keys):
        logger.warning("a key of --api-key has fewer than %d characters and is guessed soon", SAFE_KEY_CHARS)
    metrics = Metrics(llm.served_model_name, config.frontend.metrics_prefix)
    llm.observers.append(metrics.observe)
    tracer = None
    if section.otlp_traces_endpoint:
        tracer = RequestTracer(section.otlp_traces_endpoint, llm.served_model_name)
        llm.observers.append(tracer.observe)
    peers_here = Peers(config.run_dir, config.rank)
    peers_here.answers.update(metrics=_answer(metrics.own_text), pause=_answer(llm.pause), resume=_answer(llm.resume))
    app = build_app(llm, extra_rows=debug_rows(llm, metrics, peers_here), section=section, peers=peers_here)
    if section.api_servers > 1:
        await peers_here.start()                # the application has added what it answers
    if peers_here.is_paused:
        llm.pause()                             # a predecessor was told; what comes to us waits as elsewhere
    server = HttpServer(app, socket_from_fd(config.listen_fd),
                        max_connections=section.max_connections, ssl_certfile=section.ssl_certfile,
                        ssl_keyfile=section.ssl_keyfile)
    await server.start()
    ready = asyncio.ensure_future(llm.wait_ready())
    first: list[asyncio.Future[Any]] = [ready, stopping]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        life.ready(f"listening on port {server.port}")
        shutdown = await stopping
        if not shutdown.drain_s:
            llm.engine_died(shutdown.reason)    # streams end with it
        await server.stop(shutdown.drain_s)
    else:
        ready.cancel()
        await server.stop(0.0)
    peers_here.close()
    await llm.close()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)


def _answer(call: Callable[[], bytes | None]) -> Answer:
    """`call`, which takes nothing, as an answer to a peer."""
    async def answer(arguments: list[str]) -> bytes:
        return call() or b""
    return answer


def main() -> None:
    life = ChildLife.from_argv("frontend", death_signal=signal.SIGTERM)
    try:
        config = life.config(ConfigFrontend)
        configure_logging("frontend", config.log_level)
        uvloop.run(serve(config, life))
    except (ConfigError, EngineDeadError) as error:
        life.fail(str(error))
    except Exception as error:
        life.fail(f"frontend: {type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main()
