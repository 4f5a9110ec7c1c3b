"""The write stage: what tasks do with news, counted once however many messages came together."""
from __future__ import annotations

import asyncio
import time

import numpy as np

from frontend.engine_client import EngineClient
from frontend.timeline import COLUMN
from ipc.config import Peer
from ipc.messages import STAMPS, Outputs


def test_messages_that_come_together_share_one_write_after_the_last() -> None:
    """Once the first one's write reached over the second one's detokenizing, which so counted as writing."""
    async def run() -> np.ndarray:
        client = EngineClient(Peer("inproc://nobody-listens-here", 1), 1)
        try:
            for step in (1, 2, 3):
                stamps = np.full(len(STAMPS), time.monotonic_ns(), np.int64)
                stamps[STAMPS.index("step")] = step
                client._handle(Outputs(step, stamps=stamps.data.cast("B")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return client.timeline.after(0)[0]
        finally:
            client.close()

    rows = asyncio.run(run())
    assert rows[:, COLUMN["step"]].tolist() == [1, 2, 3]
    received, handled, written = (rows[:, COLUMN[name]].tolist() for name in ("received", "handled", "written"))
    assert written[:2] == handled[:2] and written[2] > handled[2]
    assert all(end <= begin for end, begin in zip(written[:2], received[1:]))
