"""One example of every message kind, and their bytes on the wire.

Values follow from the type and the name of each field, so a new field needs nothing here. The bytes stand in
golden.json. After a change of the protocol that is meant: `python -m tests.ipc.message_samples` writes them anew; the
difference belongs in the commit.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.wire_samples import MODEL as MODEL, column as column, filled as filled, samples as samples
from ipc import codec
from ipc.messages import HELLO, KINDS

GOLDEN = Path(__file__).with_name("golden.json")
EPOCH, SEQUENCE = 3, 0x1122334455


def frame_of(message: Any) -> bytes:
    return bytes(codec.encode(message, EPOCH, SEQUENCE)[0])


def golden_of_now() -> dict[str, str]:
    golden = {type(message).__name__: frame_of(message).hex() for message in samples()}
    return {"Hello": bytes(codec.hello("worker", 2, 4711, EPOCH)[0]).hex(), **golden}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_of_now(), indent=0) + "\n")
    print(f"{GOLDEN.name}: kinds {HELLO} to {max(KINDS)} of schema {codec.SCHEMA_HASH.hex()}")
