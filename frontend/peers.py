"""The other API servers of one engine: each answers a few questions of the rest on a socket in the run directory.

Several processes serve one port, and a client reaches any of them: what must hold for all (a pause, the sums on
/metrics, a response that one of them keeps) goes through here. A question is one line, a name and its arguments; the
answer is the rest of the connection. A pause is also a file, so that it outlives all of them. Knows no HTTP.
"""
from __future__ import annotations

import asyncio
import contextlib
import glob
import logging
import os
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

ANSWER_S = 1.0                                  # a peer that takes longer is left out
PREFIX = "api-"
PAUSED_FILE = "paused"                          # there: new requests wait

Answer = Callable[[list[str]], Awaitable[bytes]]         # of the question's arguments


class Peers:
    """This server's side. `answers`: question -> what it answers."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._run_dir, self._path = run_dir, os.path.join(run_dir, f"{PREFIX}{rank}")
        self._paused = os.path.join(run_dir, PAUSED_FILE)
        self.answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a predecessor's socket is replaced."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError):
            name, *arguments = (await reader.readline()).decode("ascii", "replace").split() or [""]
            answer = self.answers.get(name)
            if answer is not None:
                writer.write(await answer(arguments))
                await writer.drain()
        writer.close()

    @property
    def is_paused(self) -> bool:
        """What was said last, by any server of this engine, also one that is gone."""
        return os.path.exists(self._paused)

    async def pause(self) -> None:
        """The others' new requests wait too, and those of servers that are still to start."""
        with open(self._paused, "wb"):
            pass
        await self.ask("pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._paused)
        await self.ask("resume")

    async def ask(self, question: str) -> list[bytes]:
        """The answers of all others that live."""
        paths = [path for path in glob.glob(os.path.join(glob.escape(self._run_dir), PREFIX + "*"))
                 if path != self._path]
        found = await asyncio.gather(*(self._ask(path, question) for path in sorted(paths)))
        return [answer for answer in found if answer is not None]

    async def _ask(self, path: str, question: str) -> bytes | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(question.encode() + b"\n")
                    return await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:            # it is being restarted
            logger.warning("%s does not answer %s: %s", os.path.basename(path), question, error or "no answer in time")
            return None

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
