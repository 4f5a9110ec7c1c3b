"""The whole state of an EngineCore as bytes, and back. Taken when nothing is in flight.

For the flight recorder: a segment of recorded messages begins with one, so that replay can start there. Holds prompts
and the run's hash key; whoever stores it keeps it private.
"""
from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from engine_core.core import EngineCore
from engine_core.partial_index import in_order
from engine_core.request import Request, RequestStatus
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, WorkerReady
from ipc.sampling_params import SamplingParams

_DERIVED = ("__weakref__", "params", "stop_token_ids", "row", "tokens", "status")
_FIELDS = tuple(name for name in Request.__slots__ if name not in _DERIVED)
_PLAIN = tuple(name for name in _FIELDS if name not in ("blocks", "hashes"))    # values that are replaced, not changed
_values = operator.attrgetter(*_PLAIN)


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
    holds: list[bool]                           # of the rows
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


class Frozen:
    """The state of a core at one moment, not yet bytes: taken in passing, encoded only when someone wants to read it.

    Columns are copied by reference. A request's tokens and hashes only ever grow in place, so it is enough to note how
    many there are.
    """

    __slots__ = ("_scalars", "_requests", "_running", "_computed", "_prefilling", "_suspects", "_holds", "_moves",
                 "_free_queue", "_block_hash", "_partial", "_host_free", "_host_returned", "_costs", "_stats",
                 "_version", "_num_evicted", "_kept", "_unclaimed")

    def __init__(self, core: EngineCore) -> None:
        scheduler = core.scheduler
        rows, blocks = scheduler.rows, scheduler.blocks
        self._scalars = (core.step, core.committed_step, core._arrivals,
                         [core._needs_reset, core._is_blocked, core._is_stale], scheduler.num_batch_faults,
                         scheduler.cache_epoch)
        self._running = [r for r in rows.request[:rows.n] if r is not None]
        for request in self._running:
            rows.flush(request)
        self._requests = [(r, len(r.tokens), r.hashes, len(r.hashes), r.blocks.copy(), r.status, _values(r))
                          for r in core.requests.values()]
        self._computed: list[int] = rows.computed[:rows.n].tolist()
        self._prefilling = sorted(r.request_id for r in scheduler.prefilling)
        self._suspects = [r.request_id for r in scheduler.suspects if not r.is_finished]
        self._holds: list[bool] = rows.holds[:rows.n].tolist()
        self._moves = list(rows.moves)
        self._free_queue = list(blocks.free_queue)
        self._block_hash = blocks.block_hash.copy()
        self._partial = blocks.partial.entries() if blocks.partial is not None else []
        self._host_free, self._host_returned = list(scheduler.host._free), list(scheduler.host._returned)
        self._costs, self._stats = scheduler.costs.state(), dataclasses.asdict(scheduler.stats)
        self._version, self._num_evicted = blocks.version, blocks.num_evicted
        self._kept, self._unclaimed = core.kept.rows.copy(), blocks.unclaimed.copy()

    def encode(self) -> bytes:
        requests = []
        for r, num_bytes, hashes, num_hashes, blocks, status, values in self._requests:
            state = dict(zip(_PLAIN, values), blocks=blocks, hashes=hashes[:num_hashes])
            requests.append(RequestState(r.params, bytes(r.tokens[:num_bytes]), int(status),
                                         [state[name] for name in _FIELDS]))
        return msgspec.msgpack.encode(Snapshot(
            *self._scalars, requests, [r.request_id for r in self._running], self._computed, self._prefilling,
            self._suspects, self._holds, self._moves, np.array(self._free_queue, np.int32).tobytes(),
            [(block, h) for block, h in enumerate(self._block_hash) if h is not None], in_order(self._partial),
            self._host_free, self._host_returned, self._costs, self._stats, self._version, self._num_evicted,
            self._kept, sorted(self._unclaimed)))


def take(core: EngineCore) -> Frozen:
    """Raises RuntimeError while a plan is in flight."""
    if core.scheduler.rows.in_flight:
        raise RuntimeError(f"snapshot with {len(core.scheduler.rows.in_flight)} plans in flight")
    core.scheduler.settle()
    return Frozen(core)


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
    rows.holds[:rows.n] = snap.holds
    running = set(snap.rows)
    for request in core.requests.values():
        if request.request_id not in running:
            scheduler.waiting.push(request)
        for block in request.blocks:
            blocks.ref_count[block] += 1
    core.holds.restore(request for request in core.requests.values() if request.is_held)
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
