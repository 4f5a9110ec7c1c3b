"""The whole state of an EngineCore as bytes, and back. Taken when nothing is in flight.

For the flight recorder: a segment of recorded messages begins with one, so that replay can start there. Holds prompts
and the run's hash key; whoever stores it keeps it private.
"""
from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from engine_core.core import EngineCore
from engine_core.request import Request, RequestStatus
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, WorkerReady
from ipc.sampling_params import SamplingParams

_DERIVED = ("__weakref__", "params", "stop_token_ids", "row", "tokens", "status")
_FIELDS = tuple(name for name in Request.__slots__ if name not in _DERIVED)


class Origin(msgspec.Struct, frozen=True):
    """What an EngineCore is made from."""
    scheduler: SchedulerConfig
    cache: CacheConfig
    ready: WorkerReady
    hash_key: bytes


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """One request; `fields` are the values of Request's plain attributes, in order."""
    params: SamplingParams
    tokens: bytes
    status: int
    fields: list[Any]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """Everything that decides what an idle-in-flight core does next."""
    step: int
    committed_step: int
    arrivals: int
    flags: list[bool]                           # needs_reset, is_blocked, is_stale
    num_batch_faults: int
    cache_epoch: int
    requests: list[RequestState]
    rows: list[int]                             # request ids in row order
    computed: list[int]                         # of the rows
    prefilling: list[int]
    suspects: list[int]
    moves: list[int]
    free_queue: bytes                           # int32
    hashes: list[tuple[int, bytes]]
    partial: list[tuple[bytes, int, bytes]]     # parent, block, tokens; oldest first
    host_free: list[int]
    host_returned: list[int]
    costs: list[float]
    stats: dict[str, int]
    version: int
    num_evicted: int
    kept: dict[int, tuple[list[int], bytes]]
    unclaimed: list[int]


def take(core: EngineCore) -> bytes:
    """Raises RuntimeError while a plan is in flight."""
    scheduler = core.scheduler
    rows, blocks = scheduler.rows, scheduler.blocks
    if rows.in_flight:
        raise RuntimeError(f"snapshot with {len(rows.in_flight)} plans in flight")
    scheduler.settle()
    running = [r for r in rows.request[:rows.n] if r is not None]
    for request in running:
        rows.flush(request)
    partial = blocks.partial.entries() if blocks.partial is not None else []
    return msgspec.msgpack.encode(Snapshot(
        core.step, core.committed_step, core._arrivals, [core._needs_reset, core._is_blocked, core._is_stale],
        scheduler.num_batch_faults, scheduler.cache_epoch,
        [RequestState(r.params, bytes(r.tokens), int(r.status), [getattr(r, name) for name in _FIELDS])
         for r in core.requests.values()],
        [r.request_id for r in running], rows.computed[:rows.n].tolist(),
        sorted(r.request_id for r in scheduler.prefilling), [r.request_id for r in scheduler.suspects],
        list(rows.moves),
        np.fromiter(blocks.free_queue, np.int32, len(blocks.free_queue)).tobytes(),
        [(block, h) for block, h in enumerate(blocks.block_hash) if h is not None], partial,
        list(scheduler.host._free), list(scheduler.host._returned),
        scheduler.costs.state(), dataclasses.asdict(scheduler.stats),
        blocks.version, blocks.num_evicted, core.kept.rows, sorted(blocks.unclaimed)))


def restore(origin: Origin, data: bytes) -> EngineCore:
    """An EngineCore that decides from here on as the one the snapshot was taken of."""
    snap = msgspec.msgpack.decode(data, type=Snapshot)
    core = EngineCore(origin.scheduler, origin.cache, origin.ready, origin.hash_key)
    scheduler = core.scheduler
    rows, blocks = scheduler.rows, scheduler.blocks
    core.step, core.committed_step, core._arrivals = snap.step, snap.committed_step, snap.arrivals
    core._needs_reset, core._is_blocked, core._is_stale = snap.flags
    scheduler.num_batch_faults = snap.num_batch_faults
    scheduler.cache_epoch = snap.cache_epoch
    for state in snap.requests:
        request = Request(AddRequest(0, memoryview(b""), state.params), 0)
        for name, value in zip(_FIELDS, state.fields, strict=True):
            setattr(request, name, value)
        request.tokens = bytearray(state.tokens)
        request.status = RequestStatus(state.status)
        core.requests[request.request_id] = request
    for request_id, computed in zip(snap.rows, snap.computed, strict=True):
        request = core.requests[request_id]
        rows.append(request, scheduler.waiting.key(request), computed, len(request.blocks) * blocks.block_size)
    running = set(snap.rows)
    for request in core.requests.values():
        if request.request_id not in running:
            scheduler.waiting.push(request)
        for block in request.blocks:
            blocks.ref_count[block] += 1
    scheduler.prefilling = {core.requests[i] for i in snap.prefilling}
    scheduler.suspects = [core.requests[i] for i in snap.suspects]
    rows.moves = list(snap.moves)
    blocks.free_queue = OrderedDict.fromkeys(np.frombuffer(snap.free_queue, np.int32).tolist())
    for block, h in snap.hashes:
        blocks.block_hash[block] = h
        blocks.cached[h] = block
    if blocks.partial is not None:
        for parent, block, tokens in snap.partial:
            blocks.partial.add(block, parent, tokens)
    scheduler.host._free, scheduler.host._returned = list(snap.host_free), list(snap.host_returned)
    scheduler.costs.restore(snap.costs)
    for name, value in snap.stats.items():
        setattr(scheduler.stats, name, value)
    blocks.version, blocks.num_evicted = snap.version, snap.num_evicted
    core.kept.rows, blocks.unclaimed = snap.kept, set(snap.unclaimed)
    return core
