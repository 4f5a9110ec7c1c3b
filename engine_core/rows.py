"""The running batch: dense rows 0..n-1, the same numbers in core and worker, as numpy columns.

A request that leaves is replaced by the last row; the move is recorded for the next plan. A row number means something
only inside its plan, so each plan in flight keeps a map from its rows to the current ones.

    columns of row r, in tokens             computed <= planned < length,   known <= length
      computed   KV committed: a result confirmed it
      planned    KV there once all plans in flight are done
      known      token values the core has
      length     known + those that plans in flight will sample
    invariant: the newest token is never computed (planned < length), so a step computes length - planned tokens at most

Newest tokens stand in a ring of two blocks per row until a block is full; then they move to Request.tokens. So a move
costs the same whatever the context, and memory follows what is used. Knows no blocks and no policy.
"""
from __future__ import annotations

import numpy as np

from engine_core.request import Request, RequestStatus

I32, I64 = np.int32, np.int64
STOP_COLUMNS = 4                                # stop ids per row that are compared as columns


class PlanRecord:
    """What commit and undo need to know of a plan in flight."""

    __slots__ = ("step", "num_rows", "counts", "samples", "current", "inverse", "is_moved", "detached", "published",
                 "swapped_in", "swapped_out", "begin_ns", "end_ns", "sent_ns", "num_tokens", "num_prefill_tokens",
                 "drafted", "suspect")

    def __init__(self, step: int, num_rows: int, counts: np.ndarray | None, samples: np.ndarray | None,
                 num_tokens: int, num_prefill_tokens: int = 0) -> None:
        self.step = step
        self.num_rows = num_rows
        self.counts = counts                    # int64 per row of the plan; None: every row computes one token
        self.samples = samples                  # bool per row; None: every row samples
        self.num_tokens = num_tokens
        self.num_prefill_tokens = num_prefill_tokens    # of them, those of rows in mid-prompt
        self.is_moved = False                   # some row of the plan is not where it was
        self.current: np.ndarray = np.empty(0, I32)     # row of the plan -> row now, -1: gone (valid when is_moved)
        self.inverse: np.ndarray = np.empty(0, I32)     # row now -> row of the plan, -1: none (valid when is_moved)
        self.detached: dict[int, Request] = {}  # rows of the plan whose requests were preempted since
        self.published: list[tuple[int, bytes]] = []    # provisional until this plan commits
        self.swapped_in: list[tuple[Request, int]] = [] # request, tokens that do not depend on the swap
        self.swapped_out: list[Request] = []
        self.drafted: np.ndarray | None = None  # int64 per row: drafts among `counts`; None: nobody has any
        self.suspect: Request | None = None     # of an earlier step that failed; computes alone in this one
        self.begin_ns = self.end_ns = self.sent_ns = 0


class Rows:
    """Columns of the running batch. Capacity is the number of seats."""

    def __init__(self, seats: int, block_size: int) -> None:
        self.seats = seats
        self.block_size = block_size
        self.n = 0
        self.request: list[Request | None] = [None] * seats
        self.computed = np.zeros(seats, I64)
        self.planned = np.zeros(seats, I64)
        self.known = np.zeros(seats, I64)
        self.length = np.zeros(seats, I64)
        self.limit = np.zeros(seats, I64)       # total tokens at which the request ends
        self.floor = np.zeros(seats, I64)       # total tokens below which nothing stops it
        self.capacity = np.zeros(seats, I64)    # tokens its blocks hold
        self.prompt = np.zeros(seats, I64)
        self.ids = np.zeros(seats, I64)
        self.priority = np.zeros(seats, I64)
        self.arrival = np.zeros(seats, I64)
        self.num_spec = np.zeros(seats, I64)    # drafts that its next step may verify (Request.spec_token_ids)
        self.drafted = np.zeros(seats, I64)     # drafts in flight: planned and length count them, though they may fail
        self.holds = np.zeros(seats, bool)      # planned only when no result is awaited (speculation.py)
        self.ignore_eos = np.zeros(seats, bool)
        self.has_stop_ids = np.zeros(seats, bool)
        self.num_with_stop_ids = 0
        self.stop_ids = np.full((seats, STOP_COLUMNS), -1, I32)     # the first of its stop ids, -1: none
        self.has_many_stop_ids = np.zeros(seats, bool)              # more than fit the columns
        self.ring_width = 2 * block_size
        self.ring = np.zeros((seats, self.ring_width), I32)
        self.flat_ring = self.ring.reshape(-1)
        self.ring_base = np.arange(seats, dtype=I64) * self.ring_width
        self.iota = np.arange(seats, dtype=I32)
        self._columns = (self.computed, self.planned, self.known, self.length, self.limit, self.floor, self.capacity,
                         self.prompt, self.ids, self.priority, self.arrival, self.ignore_eos, self.has_stop_ids,
                         self.stop_ids, self.has_many_stop_ids, self.num_spec, self.drafted, self.holds)
        self.moves: list[int] = []              # pairs (row, last) for the next plan
        self.in_flight: list[PlanRecord] = []   # oldest first

    def append(self, request: Request, order: tuple[int, int], computed: int, capacity: int) -> int:
        """Give a request whose tokens are all known the next row. `order`: the policy's key."""
        row, length = self.n, request.num_known_tokens
        self.n += 1
        self.request[row] = request
        request.row = row
        request.status = RequestStatus.RUNNING
        self.computed[row] = self.planned[row] = computed
        self.known[row] = self.length[row] = length
        self.limit[row] = request.max_total_tokens
        self.floor[row] = request.min_total_tokens
        self.capacity[row] = capacity
        self.num_spec[row] = len(request.spec_token_ids)
        self.drafted[row], self.holds[row] = 0, False
        self.prompt[row] = request.num_prompt_tokens
        self.ids[row] = request.request_id
        self.priority[row], self.arrival[row] = order
        self.ignore_eos[row] = request.params.ignore_eos
        self.has_stop_ids[row] = bool(request.stop_token_ids)
        self.num_with_stop_ids += bool(request.stop_token_ids)
        ids = request.params.stop_token_ids[:STOP_COLUMNS]
        self.stop_ids[row] = ids + [-1] * (STOP_COLUMNS - len(ids))
        self.has_many_stop_ids[row] = len(request.params.stop_token_ids) > STOP_COLUMNS
        return row                              # plans in flight do not know it: its `inverse` is -1 since it was left

    def remove(self, request: Request) -> None:
        """Take a request out; the last row takes its place. Its known tokens move to `request.tokens`.

        When it is preempted (status already PREEMPTED) plans in flight keep it as detached, so that its newest token is
        still accepted; otherwise what they return for it is dropped.
        """
        row, last = request.row, self.n - 1
        self.flush(request)
        request.spec_token_ids = []
        self.num_with_stop_ids -= bool(self.has_stop_ids[row])
        for record in self.in_flight:
            self._follow_move(record, row, last, request)
        if row != last:
            for column in self._columns:
                column[row] = column[last]
            self.ring[row] = self.ring[last]
            moved = self.request[last]
            if moved is None:
                raise RuntimeError(f"row {last} of {self.n} has no request")
            self.request[row] = moved
            moved.row = row
        self.request[last] = None
        request.row = -1
        self.n = last
        self.moves += (row, last)

    def _follow_move(self, record: PlanRecord, row: int, last: int, leaving: Request) -> None:
        if not record.is_moved:
            record.is_moved = True
            record.current = self.iota[:record.num_rows].copy()
            record.inverse = np.full(self.seats, -1, I32)
            record.inverse[:record.num_rows] = record.current
        inverse, current = record.inverse, record.current
        then = int(inverse[row])
        if then >= 0:
            current[then] = -1
            if leaving.status == RequestStatus.PREEMPTED:
                record.detached[then] = leaving
                leaving.num_in_flight += 1
        if row != last:
            then = int(inverse[last])
            inverse[row] = then
            if then >= 0:
                current[then] = row
        inverse[last] = -1

    def flush(self, request: Request) -> None:
        """Move the row's known tokens that stand only in the ring to `request.tokens`."""
        row = request.row
        start, stop, width = request.num_known_tokens, int(self.known[row]), self.ring_width
        while start < stop:
            first = start % width
            count = min(stop - start, width - first)
            request.tokens += self.ring[row, first:first + count].tobytes()
            start += count

    def take_block(self, request: Request, index: int) -> bytes | None:
        """The tokens of block `index`, which is full: what of it stands only in the ring moves to `request.tokens`.

        None, changing nothing, when more than this block does.
        """
        size = self.block_size
        begin, end = index * size, (index + 1) * size
        have = len(request.tokens) >> 2
        if not begin <= have <= end:
            return None
        first = have % self.ring_width          # a block never wraps around
        request.tokens += self.ring[request.row, first:first + end - have].tobytes()
        return bytes(request.tokens[begin * 4:])

    def reset_to_committed(self) -> None:
        """Undo what plans in flight promised; the records themselves are the caller's to drop."""
        n = self.n
        self.planned[:n] = self.computed[:n]
        self.length[:n] = self.known[:n]
        self.drafted[:n] = self.num_spec[:n] = 0
        self.holds[:n] = False
        for request in self.request[:n]:
            if request is not None:
                request.spec_token_ids = []

    def in_order(self) -> list[Request]:
        """Running requests, the one to keep longest first."""
        order = np.lexsort((self.arrival[:self.n], self.priority[:self.n]))
        return [request for row in order.tolist() if (request := self.request[row]) is not None]

    def check_invariants(self) -> None:
        n = self.n
        if not ((self.computed[:n] <= self.planned[:n]).all() and (self.planned[:n] < self.length[:n]).all()
                and (self.known[:n] <= self.length[:n]).all() and (self.planned[:n] <= self.capacity[:n]).all()
                and (self.length[:n] <= self.limit[:n]).all()):
            raise RuntimeError("row columns contradict computed <= planned < length <= limit")
        for row in range(self.seats):
            request = self.request[row]
            if (request is None) != (row >= n) or (request is not None and (
                    request.row != row or request.status != RequestStatus.RUNNING
                    or self.ids[row] != request.request_id or self.num_spec[row] != len(request.spec_token_ids)
                    or self.capacity[row] != len(request.blocks) * self.block_size)):
                raise RuntimeError(f"row {row} of {n} does not agree with its request {request}")
