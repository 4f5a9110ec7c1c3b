"""`python launch.py replay FILE`: run every recorded decision again, without a model, and compare plan by plan."""
from __future__ import annotations

import json
from typing import Any

import msgspec

from engine_core import recorder as rec
from engine_core.core import EngineCore
from engine_core.snapshot import Origin, restore
from ipc.codec import decode, encode
from ipc.errors import ConfigError
from ipc.option_help import OptionParser


class PlanDiffers(Exception):
    """The core decided otherwise than recorded."""


def replay_segment(origin: Origin, segment: rec.Segment) -> tuple[EngineCore, int]:
    """(the core at the segment's end, plans compared). Raises PlanDiffers naming the event."""
    core = restore(origin, segment.snapshot)
    num_plans = 0
    for index, (what, number, frames) in enumerate(segment.events):
        if what == rec.PLAN:
            plan = core.plan()
            made = bytes(encode(plan)[0]) if plan is not None else b""
            if rec.checksum(made) != number:
                raise PlanDiffers(f"event {index}: step {core.step} differs from the recorded plan: {plan}")
            if plan is not None:
                core.plan_sent(0)
            num_plans += 1
        else:
            _apply(core, what, number, frames)
        for frontend, _ in core.take_outputs(0):
            core.outbox.sent(frontend)
    return core, num_plans


def _apply(core: EngineCore, what: int, number: int, frames: list[bytes]) -> None:
    if what == rec.GONE:
        core.frontend_gone(number)
    elif what == rec.WORKER_LOST:
        core.worker_lost()
    elif what == rec.WORKER_REPLACED:
        core.worker_replaced()
    elif what == rec.GRAMMAR_PREPARED:
        core.grammar_prepared(frames[0])
    else:
        message: Any = decode(frames)[1]
        if what == rec.HANDLE:
            core.handle(number, message)
        elif what == rec.COMMIT:
            core.commit(message)
        elif what == rec.ABORT_STEP:
            core.abort_step(message)


def load(path: str) -> rec.Recording:
    """Raises ConfigError when the file is no recording."""
    try:
        with open(path, "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=rec.Recording)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no flight recording of this version: {error}") from None


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py replay", description=__doc__)
    parser.add_argument("file")
    args = parser.parse_args(argv)
    try:
        recording = load(args.file)
    except ConfigError as error:
        parser.error(str(error))
    number = num_plans = num_events = 0
    try:
        for number, segment in enumerate(recording.segments):   # noqa: B007 (named in the error)
            num_plans += replay_segment(recording.origin, segment)[1]
            num_events += len(segment.events)
    except PlanDiffers as error:
        print(f"segment {number}: {error}")
        return 1
    print(json.dumps({"segments": len(recording.segments), "events": num_events, "plans": num_plans, "equal": True}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
