"""The flight recorder: what is recorded replays to the same plans and the same state."""
from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from bench.sim_worker import SimWorker
from engine_core import recorder as rec
from engine_core import replay
from engine_core.core import EngineCore
from engine_core.snapshot import Origin, Snapshot, restore, take
from ipc import codec
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import Abort, AddRequest, Command, StepFailed, WorkerReady
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs
from bench.simulation import pack

VOCAB = 40


def record(seed: int, num_rounds: int = 160, segment_events: int = 60) -> tuple[EngineCore, rec.Recorder, Origin]:
    """A random engine under a recorder, driven the way engine_core.main does."""
    rng = random.Random(seed)
    size, blocks, host = rng.choice([2, 4]), rng.randint(10, 30), 8
    num_drafts = rng.choice([0, 1])
    origin = Origin(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=rng.choice([8, 64]), preemption_mode="auto",
                        policy=rng.choice(["fcfs", "priority", "lpm"]), async_scheduling=rng.random() < 0.7,
                        priority_aging_steps=10, num_speculative_tokens=num_drafts,
                        max_plans_in_flight=rng.choice([2, 4])),
        CacheConfig(block_size=size, swap_space=1), WorkerReady(blocks, host, 200, VOCAB, [7], "float32", "sim", 1000),
        b"key" * 10)
    core = EngineCore(origin.scheduler, origin.cache, origin.ready, origin.hash_key)
    worker = SimWorker(blocks, size, host, VOCAB, num_speculative_tokens=num_drafts)
    recorder = rec.Recorder(core, origin, segment_events=segment_events, num_segments=3)
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    flight: list[bytes] = []

    def give(what: int, message: object) -> None:
        frames = codec.encode(message)
        recorder.note(what, 0, frames)
        {rec.HANDLE: lambda m: core.handle(0, m), rec.COMMIT: core.commit, rec.ABORT_STEP: core.abort_step}[what](
            codec.decode(frames)[1])

    for number in range(num_rounds):
        if rng.random() < 0.3:
            prompt = shared[:rng.randint(0, 12)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
            form = rng.choice([None, None, StructuredOutputs(regex="a"), StructuredOutputs(regex="b")])
            give(rec.HANDLE, AddRequest(number * 4, pack(prompt), SamplingParams(
                max_tokens=rng.randint(1, 12), seed=1, structured_outputs=form), num_choices=rng.choice([1, 1, 3]),
                priority=rng.randint(0, 2), is_replay=rng.random() < 0.1))
        if rng.random() < 0.1:
            give(rec.HANDLE, Abort([rng.randrange(number + 1) * 4]))
        if rng.random() < 0.03:
            give(rec.HANDLE, Command(1, "reset_prefix_cache"))
        if rng.random() < 0.02:
            recorder.note(rec.WORKER_LOST, 0, ())
            core.worker_lost()
            worker = SimWorker(blocks, size, host, VOCAB, num_speculative_tokens=num_drafts)
            flight.clear()
            recorder.note(rec.WORKER_REPLACED, 0, ())
            core.worker_replaced()
        if core.holds.unasked and rng.random() < 0.2:
            grammar = core.holds.unasked.pop(0)
            recorder.note(rec.GRAMMAR_PREPARED, 0, [grammar])
            core.grammar_prepared(grammar)
        while recorder.turn() and core.can_plan():
            plan = core.plan()
            if plan is None:
                recorder.note_plan(b"")
                break
            frames = codec.encode(plan, 1, number)
            recorder.note_plan(frames[0])
            flight.append(frames)
            core.plan_sent(0)
        if flight:
            plan = codec.decode(flight.pop(0))[1]
            if rng.random() < 0.05:
                worker.apply(plan)
                worker.needs_reset = True
                flight.clear()
                give(rec.ABORT_STEP, StepFailed(plan.step, "boom"))
            else:
                result = worker.execute(plan)
                result.device_ns = rng.randrange(1, 100_000)
                give(rec.COMMIT, result)
        for frontend, _ in core.take_outputs(0):
            core.outbox.sent(frontend)
    return core, recorder, origin


def state_of(snapshot: bytes) -> Snapshot:
    return msgspec.msgpack.decode(snapshot, type=Snapshot)


@pytest.mark.parametrize("seed", range(40))
def test_replay_makes_every_plan_again_and_ends_in_the_same_state(seed: int, tmp_path: Path) -> None:
    core, recorder, _ = record(seed)
    recording = replay.load(recorder.dump(str(tmp_path / "flight")))
    assert len(recording.segments) >= 2
    replayed = None
    snapshots = iter([segment.snapshot for segment in recording.segments[1:]])
    for segment in recording.segments:
        replayed, num_plans = replay.replay_segment(recording.origin, segment)
        assert num_plans == sum(what == rec.PLAN for what, _, _ in segment.events)
        following = next(snapshots, None)
        assert following is None or state_of(take(replayed).encode()) == state_of(following)
    if not core.scheduler.rows.in_flight:
        assert replayed is not None and state_of(take(replayed).encode()) == state_of(take(core).encode())


def test_a_changed_decision_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, recorder, _ = record(3)
    path = recorder.dump(str(tmp_path / "flight"))
    assert replay.main([path]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    recording = replay.load(path)
    events = recording.segments[0].events
    index = next(i for i, event in enumerate(events) if event[0] == rec.PLAN)
    events[index] = (rec.PLAN, events[index][1] ^ 1, [])
    with pytest.raises(replay.PlanDiffers, match=f"event {index}"):
        replay.replay_segment(recording.origin, recording.segments[0])


def test_a_snapshot_restores_to_the_same_snapshot() -> None:
    core, _, origin = record(5, num_rounds=40)
    while core.scheduler.rows.in_flight:
        core, _, origin = record(random.Random(core.step).randrange(1000), num_rounds=41)
    data = take(core).encode()
    assert take(restore(origin, data)).encode() == data


def test_a_suspect_that_was_aborted_is_no_part_of_a_snapshot() -> None:
    origin = Origin(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), CacheConfig(block_size=4),
                    WorkerReady(30, 0, 200, VOCAB, [7], "float32", "sim", 0), b"key" * 10)
    core = EngineCore(origin.scheduler, origin.cache, origin.ready, origin.hash_key)
    for number in range(2):
        core.handle(0, AddRequest(number, pack([1, 2, 3]), SamplingParams(max_tokens=4, seed=1)))
    plan = core.plan()
    assert plan is not None
    core.abort_step(StepFailed(plan.step, "boom"))
    core.handle(0, Abort([0]))
    again = restore(origin, take(core).encode())
    assert codec.encode(again.plan()) == codec.encode(core.plan())
    assert [request.request_id for request in again.scheduler.suspects] == [1]


def test_a_recording_is_private(tmp_path: Path) -> None:
    _, recorder, _ = record(1, num_rounds=10)
    assert Path(recorder.dump(str(tmp_path / "flight"))).stat().st_mode & 0o777 == 0o600


def test_the_ring_keeps_the_newest_segments() -> None:
    _, recorder, _ = record(2, num_rounds=400, segment_events=30)
    assert len(recorder._segments) == 3
