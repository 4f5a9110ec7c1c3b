"""Chooses what the next step computes: which request, how many tokens, and which blocks hold them.

Running requests come first (users watch their streams), then admissions, while tokens of the budget are left. Rows that
compute one token are handled as columns; Python touches only rows that need a block, are in mid-prompt, enter or leave.
When the pool is too small, the last running request in policy order gives its blocks back; a victim is never one that
this step already serves. Knows no messages, no clock, no tensors. Source: vLLM V1's unified scheduler; Agrawal et al.
2024 (Sarathi-Serve) for chunked prefill under a token budget.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine_core.admission import admit, admit_one
from engine_core.block_hash import BlockHasher
from engine_core.block_manager import BlockManager, HostPool
from engine_core.cache_log import CacheLog
from engine_core.policies import LongestPrefixQueue, WaitingQueue
from engine_core.preemption import CostModel, make_room_for_urgent, preempt
from engine_core.request import Request, RequestStatus
from engine_core.rows import PlanRecord, Rows
from engine_core.speculation import blocks_for_drafts, drop_drafts, plan_drafts, promise_drafts, rows_on_hold
from engine_core.stats import SchedulerStats
from ipc.config import SchedulerConfig


NEVER_PUBLISH = 1 << 60         # as num_published: leaving publishes nothing


class Step:
    """What one call of `schedule` decided. Requests, not rows: rows may still move until all of it is known."""

    __slots__ = ("extend", "chunks", "advance", "new", "swap_out", "swap_in", "copies", "preempted", "published",
                 "swapped_in", "swapped_out", "idle", "drafts", "suspect")

    def __init__(self) -> None:
        self.extend: list[tuple[Request, int]] = []         # blocks appended to tables
        self.chunks: list[tuple[Request, int]] = []         # requests in mid-prompt and how much of it
        self.advance: list[tuple[Request, int]] = []        # tokens adopted from the cache in mid-prompt
        self.idle: list[Request] = []                       # rows that compute nothing
        self.drafts: list[tuple[Request, list[int]]] = []   # rows that verify these besides their newest token
        self.new: list[Request] = []
        self.swap_out: list[int] = []                       # pairs (block, host slot)
        self.swap_in: list[int] = []                        # pairs (host slot, block)
        self.copies: list[int] = []                         # pairs (source, target)
        self.preempted: list[Request] = []
        self.published: list[tuple[int, bytes]] = []
        self.swapped_in: list[tuple[Request, int]] = []
        self.swapped_out: list[Request] = []
        self.suspect: Request | None = None                 # the only one that computes


class Scheduler:
    """Owner of the waiting queue, the rows and the blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, hasher: BlockHasher, *, num_host_slots: int,
                 max_model_len: int, swap_block_ns: int) -> None:
        self.config, self.blocks, self.hasher = config, blocks, hasher
        self.host = HostPool(num_host_slots)
        # A row computes at least one token a step, so there are never more seats than tokens in the budget.
        self.rows = Rows(min(config.max_num_seqs, config.max_num_batched_tokens), blocks.block_size)
        self.costs = CostModel(swap_block_ns)
        if config.policy == "lpm":
            self.waiting: WaitingQueue = LongestPrefixQueue(config, self.cached_tokens, lambda: blocks.version)
        else:
            self.waiting = WaitingQueue(config)
        self.prefilling: set[Request] = set()               # rows with more than one token to compute
        self.cache_log = CacheLog()
        self.suspects: list[Request] = []                   # of a failed step: each replays alone before others run
        self.num_batch_faults = 0                           # failed steps of several requests since one succeeded
        self.stats = SchedulerStats()
        self.max_model_len = max_model_len
        self.cache_epoch = 0
        self.on_finish: Callable[[Request], None] | None = None     # called before an ended request's blocks are freed
        self._unsettled: list[Request] = []                 # rows that filled a block: hash and publish it

    @property
    def max_request_tokens(self) -> int:
        """Most tokens one request can reach: its last one is never computed, so it needs no slot."""
        return min(self.max_model_len, self.blocks.num_blocks * self.blocks.block_size + 1)

    @property
    def has_work(self) -> bool:
        """Something can run, now or when a plan in flight is done."""
        return self.rows.n > 0 or len(self.waiting) > self.waiting.num_held

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. Hashes its prompt now, while the device works on an earlier step.

        Raises ValueError when it can never run. `max_total_tokens` is clamped to what fits.
        """
        known, prompt = request.num_known_tokens, request.num_prompt_tokens
        if prompt < 1:
            raise ValueError("the prompt is empty; it needs at least one token")
        if prompt >= self.max_model_len:
            raise ValueError(f"the prompt has {prompt} tokens and max_model_len is {self.max_model_len}, which leaves "
                             "no room for an output token; shorten it or raise --max-model-len")
        if known >= self.max_request_tokens:
            capacity = self.blocks.num_blocks * self.blocks.block_size
            raise ValueError(f"the prompt has {known} tokens and the whole cache holds {capacity}; shorten it or raise "
                             "--kv-cache-memory")
        if not self.config.enable_chunked_prefill and prompt > self.config.max_num_batched_tokens:
            raise ValueError(f"the prompt has {prompt} tokens, a step {self.config.max_num_batched_tokens}, and "
                             "chunked prefill is off; shorten it or raise --max-num-batched-tokens")
        wanted = request.params.max_tokens
        limit = self.max_request_tokens
        request.max_total_tokens = limit if wanted is None else min(prompt + wanted, limit)
        self._set_root(request, self.cache_epoch)
        self.waiting.push(request)

    def finish(self, request: Request) -> None:
        """Take a request out for good, in whatever state it is. Its computed blocks stay findable."""
        status, request.status = request.status, RequestStatus.FINISHED
        if status == RequestStatus.RUNNING:
            self._leave(request)
            if self.on_finish is not None:
                self.on_finish(request)
            self.blocks.free(request.blocks)
            request.blocks = []
        elif status != RequestStatus.FINISHED:
            self.waiting.discard(request)
        self.drop_swap(request)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the cache holds now."""
        size = self.blocks.block_size
        limit = min((request.num_known_tokens - 1) // size, len(request.hashes))
        return len(self.blocks.find_cached_prefix(request.hashes, 0, limit)) * size

    def reset_prefix_cache(self) -> None:
        """No block computed until now is found again, nor any that is computed from one.

        Requests that have old keys and values, in blocks or in host memory, go on with a root of their own (an epoch
        that nobody else has); the others begin in the new epoch.
        """
        self.cache_epoch += 1
        self.blocks.forget()
        for request in [r for r in self.rows.request[:self.rows.n] if r is not None] + list(self.waiting):
            is_old = request.row >= 0 or request.num_swapped_tokens > 0
            self._set_root(request, -request.arrival if is_old else self.cache_epoch)

    def _set_root(self, request: Request, epoch: int) -> None:
        """Start the hash chain, over all tokens known outside the row. A request that needs all of its prompt computed
        has a chain of its own, another one at each return, so it finds no cached block."""
        if request.params.needs_whole_prompt:
            epoch = -(request.arrival + (request.num_preemptions << 40))
        request.is_shared = epoch == self.cache_epoch
        request.root, request.hashes = self.hasher.root(epoch=epoch, salt=request.salt), []
        if self.blocks.enable_prefix_caching:
            self.hasher.extend(request.hashes, request.root, request.tokens)

    def _leave(self, request: Request) -> None:
        """Out of the rows; what it computed and is known is published."""
        computed = int(self.rows.computed[request.row])
        self.rows.remove(request)
        self.prefilling.discard(request)
        if request.num_published != NEVER_PUBLISH:
            self._publish_committed(request, computed)
            self.publish_tail(request, computed)
        request.num_published = 0

    def drop_swap(self, request: Request) -> None:
        if request.host_slots:
            self.host.give_back(request.host_slots)
            request.host_slots = []
        request.num_swapped_tokens = 0

    # ------------------------------------------------------------ publishing

    def _publish_committed(self, request: Request, num_computed: int) -> None:
        """Publish full blocks of committed tokens: nothing can undo them."""
        if not self.blocks.enable_prefix_caching:
            return
        self.hasher.extend(request.hashes, request.root, request.tokens)
        full = min(num_computed // self.blocks.block_size, len(request.hashes))
        for i in range(request.num_published, full):
            self.blocks.publish(request.blocks[i], request.hashes[i], *self._content(request, i))
        request.num_published = max(request.num_published, full)

    def _content(self, request: Request, i: int) -> tuple[bytes, bytes]:
        """What precedes a request's i-th block, and the tokens in it."""
        size = self.blocks.block_size * 4
        return request.hashes[i - 1] if i else request.root, bytes(request.tokens[i * size:(i + 1) * size])

    def publish_tail(self, request: Request, num_computed: int) -> None:
        """A request ends: the computed part of its last block can be found too, to be copied."""
        full, rest = divmod(num_computed, self.blocks.block_size)
        partial = self.blocks.partial
        if partial is None or not rest or len(request.hashes) < full:
            return
        if self.blocks.ref_count[request.blocks[full]] != 1:
            return
        parent, tokens = self._content(request, full)
        partial.add(request.blocks[full], parent, tokens[:rest * 4])

    def publish_planned(self, request: Request, num_planned: int, step: Step) -> None:
        """Publish full blocks that this step fills, so that later admissions, in the same step too, adopt them: every
        layer writes all keys and values before any attention reads them. Undone if the step fails."""
        if not self.blocks.enable_prefix_caching:
            return
        full = min(num_planned // self.blocks.block_size, len(request.hashes))
        for i in range(request.num_published, full):
            if self.blocks.publish(request.blocks[i], request.hashes[i], *self._content(request, i)):
                step.published.append((request.blocks[i], request.hashes[i]))
        request.num_published = max(request.num_published, full)

    def note_filled(self, rows: np.ndarray) -> None:
        """These rows' committed tokens just filled a block."""
        request = self.rows.request
        self._unsettled += [r for i in rows.tolist() if (r := request[i]) is not None]

    def settle(self) -> None:
        """Hash and publish blocks that decodes filled. Not urgent: called when the next plan is on its way."""
        rows, size = self.rows, self.blocks.block_size
        for request in self._unsettled:
            if request.row < 0:
                continue
            computed = int(rows.computed[request.row])
            index = computed // size - 1
            hashes = request.hashes
            tokens = rows.take_block(request, index) if len(hashes) == index == request.num_published else None
            if tokens is None or not self.blocks.enable_prefix_caching:
                rows.flush(request)
                self._publish_committed(request, computed)
                continue
            parent = hashes[-1] if index else request.root
            key = self.hasher.next(parent, tokens)
            hashes.append(key)
            self.blocks.publish(request.blocks[index], key, parent, tokens)
            request.num_published = index + 1
        self._unsettled.clear()

    # ------------------------------------------------------------ one step

    def schedule(self) -> Step:
        """Choose the next step. Rows' `planned` is unchanged until `promise`."""
        step = Step()
        self.host.next_plan()
        if self._unsettled and len(self.waiting):
            self.settle()                                   # someone may adopt these blocks
        budget = self.config.max_num_batched_tokens
        self.suspects = [request for request in self.suspects if not request.is_finished]
        step.suspect = next((request for request in self.suspects if not request.is_held), None)
        if step.suspect is not None:
            drop_drafts(self.rows, self.rows.num_spec[:self.rows.n].nonzero()[0].tolist())
            self._serve_suspect(step, step.suspect, budget)
            return step
        if self.config.policy == "priority":
            make_room_for_urgent(self, step)
        num_urgent = len(step.preempted)
        if self.rows.n:
            budget = self._serve_running(step, budget)
        if len(step.preempted) == num_urgent:                # else the pool is evidently full
            admit(self, step, budget)
        return step

    def promise(self, step: Step, number: int) -> PlanRecord | None:
        """Enter the step into the columns and return its record, or None when it computes nothing at all."""
        rows, n = self.rows, self.rows.n
        drafted = None
        if not step.chunks and not step.idle and not step.drafts:
            counts = samples = None
            if n == 0 and not step.swap_out:
                return None
            rows.planned[:n] += 1
            rows.length[:n] += 1
            num_tokens = n
        else:
            counts = np.ones(n, np.int64)
            for request, count in step.chunks:
                counts[request.row] = count
            for request in step.idle:
                counts[request.row] = 0
            if step.drafts:
                drafted = promise_drafts(rows, step, counts)
            num_tokens = int(counts.sum())
            if num_tokens == 0 and not step.swap_out:
                return None
            for request, count in step.advance:
                counts[request.row] += count
            rows.planned[:n] += counts
            samples = rows.planned[:n] == rows.length[:n]   # an idle row has planned < length
            rows.length[:n] += samples
            for request, _ in step.chunks:
                if samples[request.row]:
                    self.prefilling.discard(request)
        record = PlanRecord(number, n, counts, samples, num_tokens, sum(count for _, count in step.chunks))
        record.drafted, record.suspect = drafted, step.suspect
        record.published, record.swapped_in, record.swapped_out = step.published, step.swapped_in, step.swapped_out
        rows.in_flight.append(record)
        stats = self.stats
        self.cache_log.note(number, stats.num_cached_tokens, num_tokens,
                            self.blocks.num_evicted * self.blocks.block_size)
        return record

    def _serve_running(self, step: Step, budget: int) -> int:
        """Tokens for running rows. Returns what is left of the budget."""
        rows, blocks, n = self.rows, self.blocks, self.rows.n
        prefilling = self.prefilling
        ending = rows.length[:n] >= rows.limit[:n]          # their last token is in flight
        with_drafts: list[int] = []
        if self.config.num_speculative_tokens:
            ending |= rows_on_hold(rows)
            with_drafts = ((rows.num_spec[:n] > 0) & ~ending).nonzero()[0].tolist()
        idle = ending.nonzero()[0].tolist() if ending.any() else []
        need = (rows.planned[:n] == rows.capacity[:n]).nonzero()[0].tolist()
        request_of = rows.request
        if need and (prefilling or idle or with_drafts):
            need = [r for r in need if request_of[r] not in prefilling and r not in idle and r not in with_drafts]
        budget -= n - len(prefilling) - len(idle)
        chunks, wanted = [], len(need) + blocks_for_drafts(self, with_drafts)
        if prefilling:
            left = budget
            for request in sorted(prefilling, key=self.waiting.key):
                count = self.chunk(int(rows.length[request.row] - rows.planned[request.row]), left)
                left -= count
                fresh = max(blocks.blocks_for(int(rows.planned[request.row]) + count) - len(request.blocks), 0)
                chunks.append((request, count, fresh))
                wanted += fresh
        if wanted > blocks.num_free:
            drop_drafts(rows, with_drafts)
            return self._serve_tight(step, budget)
        budget = plan_drafts(self, with_drafts, step, budget)
        for r in need:
            request = request_of[r]
            if request is None:
                raise RuntimeError(f"row {r} of {n} has no request")
            block = blocks.pop_free()
            request.blocks.append(block)
            step.extend.append((request, block))
        if need:
            rows.capacity[need] += blocks.block_size
        reserve = sum(fresh for _, _, fresh in chunks)
        for request, _, fresh in chunks:
            reserve -= fresh
            if budget <= 0:
                step.idle.append(request)
                continue
            budget -= self._serve_chunk(step, request, budget, reserve)
        step.idle += [r for i in idle if (r := request_of[i]) is not None]
        return budget

    def chunk(self, remaining: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold if self.config.enable_chunked_prefill else 0
        return max(min(remaining, budget, threshold) if threshold else min(remaining, budget), 0)

    def _serve_chunk(self, step: Step, request: Request, budget: int, reserve: int) -> int:
        """One prefill chunk; what the cache has meanwhile is adopted instead of computed. `reserve` free blocks belong
        to rows that come later. Returns the tokens spent."""
        rows, blocks, size, row = self.rows, self.blocks, self.blocks.block_size, request.row
        planned, length = int(rows.planned[row]), int(rows.length[row])
        have = len(request.blocks)
        adopted: list[int] = []
        if planned == have * size:
            adopted = blocks.find_cached_prefix(request.hashes, have, (length - 1) // size)
        while True:
            start = planned + len(adopted) * size
            count = self.chunk(length - start, budget)
            fresh = max(blocks.blocks_for(start + count) - have - len(adopted), 0)
            cost = fresh + sum(1 for b in adopted if blocks.ref_count[b] == 0)
            if not adopted or cost <= blocks.num_free - reserve:
                break
            adopted = []                                    # would take what others were promised
        got = blocks.allocate(fresh, adopted)
        if got is None:
            raise RuntimeError(f"{fresh} blocks were promised and {blocks.num_free} are free")
        self.extend(step, request, adopted + got)
        if adopted:
            step.advance.append((request, len(adopted) * size))
            request.num_published = have + len(adopted)
            self.stats.num_adopted_tokens += len(adopted) * size
        step.chunks.append((request, count))
        self.publish_planned(request, start + count, step)
        return count

    def extend(self, step: Step, request: Request, new: list[int]) -> None:
        if new:
            request.blocks += new
            step.extend += [(request, block) for block in new]
            self.rows.capacity[request.row] = len(request.blocks) * self.blocks.block_size

    def _serve_tight(self, step: Step, prefill_budget: int) -> int:
        """As _serve_running when the pool is too small: strictly in order, the last ones give their blocks back."""
        rows, blocks = self.rows, self.blocks
        order = rows.in_order()
        index, end = 0, len(order)
        while index < end:
            request = order[index]
            row = request.row
            index += 1
            planned, length = int(rows.planned[row]), int(rows.length[row])
            if length >= int(rows.limit[row]) or (rows.holds[row] and length > rows.known[row]):
                step.idle.append(request)
                continue
            is_prefill = request in self.prefilling
            count = self.chunk(length - planned, prefill_budget) if is_prefill else 1
            if count == 0:
                step.idle.append(request)
                continue
            fresh = max(blocks.blocks_for(planned + count) - len(request.blocks), 0)
            got = blocks.allocate(fresh)
            while got is None:
                end -= 1
                victim = order[end]
                preempt(self, victim, step)
                if victim is request:
                    return 0                                # the last in order; nobody behind it to ask
                got = blocks.allocate(fresh)
            self.extend(step, request, got)
            if is_prefill:
                prefill_budget -= count
                step.chunks.append((request, count))
                self.publish_planned(request, planned + count, step)
        return prefill_budget

    def _serve_suspect(self, step: Step, request: Request, budget: int) -> None:
        """Plan a suspect of a failed step alone; every other row waits."""
        rows = self.rows
        if request.row < 0:
            self._until_it_fits(step, request, lambda: rows.n < rows.seats
                                and admit_one(self, step, request, budget) > 0)
        else:
            planned, length = int(rows.planned[request.row]), int(rows.length[request.row])
            count = self.chunk(length - planned, budget)    # nothing is in flight: at least its newest token
            fresh = max(self.blocks.blocks_for(planned + count) - len(request.blocks), 0)
            self._until_it_fits(step, request, lambda: self.blocks.num_free >= fresh)
            self.extend(step, request, self.blocks.allocate(fresh) or [])
            step.chunks.append((request, count))
            self.publish_planned(request, planned + count, step)
        step.idle += [r for r in rows.request[:rows.n] if r is not None and r is not request]

    def _until_it_fits(self, step: Step, request: Request, fits: Callable[[], bool]) -> None:
        """Preempt others, last in order first, until `fits`."""
        victims = [r for r in self.rows.in_order() if r is not request]
        while not fits():
            if not victims:
                raise RuntimeError(f"{request} does not fit a pool of {self.blocks.num_blocks} blocks alone")
            preempt(self, victims.pop(), step)

    def give_back(self, request: Request) -> None:
        """Out of the running batch and back into the queue; its blocks are free."""
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._leave(request)
        self.blocks.free(request.blocks)
        request.blocks = []
        if request.params.needs_whole_prompt:
            self._set_root(request, self.cache_epoch)
        self.waiting.push(request)

    def recompute(self, request: Request) -> None:
        """A running request has a block that turned out to be worthless: it starts over from its tokens. What plans in
        flight return for it was computed from that block and is dropped."""
        request.num_recomputed_tokens += int(self.rows.computed[request.row])
        request.num_published = NEVER_PUBLISH
        self.give_back(request)
        if self.blocks.enable_prefix_caching:               # of all it knows, as for every waiting request
            self.hasher.extend(request.hashes, request.root, request.tokens)
        for record in self.rows.in_flight:
            record.detached = {row: other for row, other in record.detached.items() if other is not request}
        request.num_in_flight = 0

    # ------------------------------------------------------------ checking

    def check_invariants(self, requests: list[Request]) -> None:
        """Raises RuntimeError when blocks, rows and queue contradict each other. `requests`: all that are alive."""
        self.rows.check_invariants()
        self.blocks.check_invariants(request.blocks for request in requests)
        self.host.check_invariants(request.host_slots for request in requests)
        if self.rows.n + len(self.waiting) != len(requests):
            raise RuntimeError(f"{self.rows.n} running and {len(self.waiting)} waiting of {len(requests)} requests")
