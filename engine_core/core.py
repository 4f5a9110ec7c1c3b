"""EngineCore: messages in, plans and outputs out. plan() promises, commit() keeps, abort_step() takes back.

A pure function of its messages: it reads no clock (times are handed in) and draws no random numbers, so a recorded list
of messages replays exactly. Every exception has an owner: what is wrong with one request ends that request; only a
broken invariant leaves these methods.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine_core.block_hash import BlockHasher
from engine_core.block_manager import BlockManager
from engine_core.grammar_holds import GrammarHolds
from engine_core.kept_rows import KeptRows
from engine_core.outbox import NUMBER_SHIFT, Outbox
from engine_core.overview import overview
from engine_core.recovery import forget_pool, requests_of, undo_in_flight
from engine_core.request import Request
from engine_core.rows import PlanRecord
from engine_core.scheduler import Scheduler, Step
from engine_core.status import explain
from engine_core.stop import StopChecker
from engine_core.update import owner, update
from ipc.config import CacheConfig, SchedulerConfig
from ipc.errors import FAULT, INVALID, OVERLOADED
from ipc.messages import (EMPTY, FINISH_ABORT, FINISH_ERROR, Abort, AddRequest, Admitted, Command, CommandReply,
                          Finished, ModelRunnerOutput, NewRow, Outputs, Pooled, SchedulerOutput, StepFailed,
                          TokenLogprobs, WorkerReady)
from ipc.sampling_params import MAX_N, PRIORITY_LIMIT

logger = logging.getLogger(__name__)

MAX_STEP_FAULTS = 2                             # failed steps that end a request, if it was alone in the last
MAX_LOST_WORKERS = 3                            # the same for steps that ended the worker (others may have killed it)
KEPT_PLANS = 1000                               # after so many, nobody adds a request of a former core any more
MAX_BATCH_FAULTS = 3                            # failed steps of several requests in a row that end all of them
_encode = msgspec.msgpack.Encoder().encode


def _pack(numbers: list[int]) -> memoryview:
    return np.array(numbers, np.int32).data.cast("B") if numbers else EMPTY


class EngineCore:
    """One engine: requests of all frontends, one scheduler, plans in flight up to the window."""

    def __init__(self, scheduler_config: SchedulerConfig, cache: CacheConfig, ready: WorkerReady,
                 hash_key: bytes) -> None:
        self.ready, self.config = ready, scheduler_config
        blocks = BlockManager(ready.num_blocks, cache.block_size, cache.enable_prefix_caching,
                              cache.enable_partial_reuse)
        self.scheduler = Scheduler(scheduler_config, blocks, BlockHasher(hash_key, cache.block_size),
                                   num_host_slots=ready.num_host_blocks, max_model_len=ready.max_model_len,
                                   swap_block_ns=ready.swap_block_ns)
        self.stop = StopChecker(ready.eos_token_ids, ready.vocab_size)
        self.window = scheduler_config.max_plans_in_flight if scheduler_config.async_scheduling else 1
        self.requests: dict[int, Request] = {}
        self.kept = KeptRows()
        self.holds = GrammarHolds()
        self.outbox = Outbox()
        self.step = 0                           # number of the last plan
        self.committed_step = 0
        self._arrivals = 0
        self._needs_reset = False
        self._is_stale = False                  # the prefix cache was reset; the next plan says so
        self._is_blocked = False                # the last plan was empty; wait for news before the next
        self.on_dump: Callable[[], str] | None = None   # writes the flight recording, returns its path
        self._commands = {"stats": self._stats, "reset_prefix_cache": self._reset_prefix_cache,
                          "request_status": self._request_status, "prefix_cache_stats": self._prefix_cache_stats,
                          "dump_recording": self._dump_recording, "check": self._check,
                          "overview": lambda _: overview(self.scheduler)}

    # ------------------------------------------------------------ messages of frontends

    def handle(self, number: int, message: Any) -> CommandReply | None:
        """Take one message of frontend `number`. Only a Command is answered by the return value."""
        self._is_blocked = False
        if isinstance(message, AddRequest):
            self._add(number, message)
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                request = self.requests.get(request_id)
                if request is not None and request_id >> NUMBER_SHIFT == number:
                    self._end(request, FINISH_ABORT)
        elif isinstance(message, Command):
            return self._command(message)
        else:
            logger.warning("frontend %d sent a %s, which is not for the core; dropped", number, type(message).__name__)
        return None

    def _add(self, number: int, message: AddRequest) -> None:
        """Accept all choices of a request or none."""
        ids = range(message.request_id, message.request_id + message.num_choices)
        code, error = self._refusal(number, message, ids)
        if not error:
            requests = [Request(message, self._arrivals + 1 + i, self.step, i) for i in range(message.num_choices)]
            try:
                message.sampling_params.check_for_model(self.stop.vocab_size)
                for request in requests:
                    self.scheduler.add(request)
            except ValueError as problem:       # the same for every choice, so none was queued
                code, error = INVALID, str(problem)
            else:
                self._arrivals += message.num_choices
                self.requests.update((request.request_id, request) for request in requests)
                if self.kept.rows:
                    for request in requests:
                        self.kept.claim(request, self.scheduler.blocks)
                if message.is_replay:           # whatever took it from its core may have taken the worker, too
                    self.holds.hold(requests, self.scheduler.waiting)
                if message.output_token_ids:
                    self._end_complete(requests)
                return
        for request_id in ids[:MAX_N]:
            self.outbox.finished(Finished(request_id, FINISH_ERROR, error_code=code, message=error), number)

    def _end_complete(self, requests: list[Request]) -> None:
        """End those that were re-added with all of their output: only the news of their end was lost."""
        for request in requests:
            end = self.stop.check_one(int.from_bytes(request.tokens[-4:], "little"), request.num_known_tokens,
                                      request.min_total_tokens, request.max_total_tokens, request.params.ignore_eos,
                                      request.stop_token_ids)
            if end is not None:
                self._end(request, end[0], stop_token=end[1])

    def _refusal(self, number: int, message: AddRequest, ids: range) -> tuple[int, str]:
        """(code, why) a request cannot even be queued; ("", 0): it can."""
        if not 1 <= message.num_choices <= MAX_N:
            return INVALID, f"n is {message.num_choices}; allowed are 1 to {MAX_N}"
        if not 0 <= message.choice < MAX_N:
            return INVALID, f"choice is {message.choice}; allowed are 0 to {MAX_N - 1}"
        if abs(message.priority) > PRIORITY_LIMIT:
            return INVALID, f"priority is {message.priority}; allowed are {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        if any(i >> NUMBER_SHIFT != number or i in self.requests for i in ids):
            return INVALID, f"request id {message.request_id} is not free for frontend {number}"
        if len(message.prompt_token_ids) % 4 or len(message.output_token_ids) % 4:
            return INVALID, "token ids must be whole int32 values"
        vocab_size = self.stop.vocab_size
        for name in ("prompt", "output"):
            tokens = np.frombuffer(getattr(message, f"{name}_token_ids"), np.int32)
            if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                return INVALID, (f"{name} has token ids {tokens.min()} to {tokens.max()}; the model's are 0 to "
                                 f"{vocab_size - 1}")
        if message.is_replay:                   # accepted before: a full queue is no reason to end it now
            return 0, ""
        waiting, config = self.scheduler.waiting, self.config
        if not len(waiting):                    # one that is over a bound alone could never be served
            return 0, ""
        if config.max_num_queued_reqs and len(waiting) + len(ids) > config.max_num_queued_reqs:
            return OVERLOADED, (f"{len(waiting)} requests wait and at most {config.max_num_queued_reqs} may; try "
                                "again, or raise --max-num-queued-reqs")
        size = len(ids) * (len(message.prompt_token_ids) + len(message.output_token_ids)) // 4
        if config.max_num_queued_tokens and waiting.num_tokens + size > config.max_num_queued_tokens:
            return OVERLOADED, (f"{waiting.num_tokens} tokens wait, the request has {size} and at most "
                                f"{config.max_num_queued_tokens} may wait; try again, or raise --max-num-queued-tokens")
        return 0, ""

    def _end(self, request: Request, reason: int, *, stop_token: int = -1, code: int = 0, message: str = "") -> None:
        """End a request that has not ended, now."""
        self.scheduler.finish(request)
        self._report_end(request, reason, stop_token, code, message)

    def _report_end(self, request: Request, reason: int, stop_token: int = -1, code: int = 0,
                    message: str = "") -> None:
        del self.requests[request.request_id]
        self.outbox.finished(Finished(request.request_id, reason, stop_token, code, message, request.num_cached_tokens,
                                      request.num_preemptions), request.request_id >> NUMBER_SHIFT)

    def frontend_gone(self, number: int) -> None:
        """A frontend ended or said Hello anew: nobody waits for what it had asked."""
        for request in [r for r in self.requests.values() if r.request_id >> NUMBER_SHIFT == number]:
            self._end(request, FINISH_ABORT)
        self.outbox.forget(number)
        self._is_blocked = False

    # ------------------------------------------------------------ plan and commit

    def can_plan(self) -> bool:
        scheduler = self.scheduler
        window = 1 if scheduler.suspects else self.window
        return scheduler.has_work and not self._is_blocked and len(scheduler.rows.in_flight) < window

    def plan(self, now_ns: int = 0) -> SchedulerOutput | None:
        """The next step, or None when nothing can be computed until a result or a message arrives.

        Raises RuntimeError when work exists, nothing is in flight and nothing could be scheduled: the progress theorem.
        """
        scheduler = self.scheduler
        rows = scheduler.rows
        idle = not rows.in_flight
        step = scheduler.schedule()
        for request in step.new:
            if request.num_preemptions == 0:
                self.outbox.admitted(Admitted(request.request_id, request.num_cached_tokens,
                                              request.max_total_tokens - request.num_prompt_tokens, now_ns),
                                     request.request_id >> NUMBER_SHIFT)
        new, tokens, block_ids = self._new_rows(step)
        number = self.step + 1
        record = scheduler.promise(step, number)
        if record is None:
            if idle and scheduler.has_work:
                raise RuntimeError(f"no progress: {rows.n} running, {len(scheduler.waiting)} waiting, "
                                   f"{scheduler.blocks.num_free} of {scheduler.blocks.num_blocks} blocks free, "
                                   "nothing in flight, nothing scheduled")
            self._is_blocked = True
            return None
        self.step = number
        if self.kept.rows and number > KEPT_PLANS:
            self.kept.rows.clear()
        record.begin_ns = now_ns
        plan = SchedulerOutput(number, rows.n, new=new, new_tokens=tokens, new_blocks=block_ids,
                               swap_out=_pack(step.swap_out), copies=_pack(step.copies), swap_in=_pack(step.swap_in))
        if self._needs_reset:
            plan.reset, self._needs_reset = True, False
        else:
            plan.moves = _pack(rows.moves)
            if step.extend:
                plan.extend = _pack([x for request, block in step.extend for x in (request.row, block)])
            if step.advance:
                plan.advance = _pack([x for request, count in step.advance for x in (request.row, count)])
        plan.stale, self._is_stale = self._is_stale, False
        rows.moves.clear()
        if step.drafts:
            plan.spec_token_ids = _pack([x for request, drafts in step.drafts for token in drafts
                                         for x in (request.row, token)])
        if step.chunks or step.idle or step.drafts:
            # A chunk of one token is named too when its prompt goes on: a row that is not named samples.
            ends = record.samples if record.samples is not None else np.ones(rows.n, bool)
            plan.counts = _pack([x for request, count in step.chunks if count != 1 or not ends[request.row]
                                 for x in (request.row, count)]
                                + [x for request, drafts in step.drafts if drafts
                                   for x in (request.row, 1 + len(drafts))]
                                + [x for request in step.idle for x in (request.row, 0)])
        return plan

    def _new_rows(self, step: Step) -> tuple[list[NewRow], memoryview, memoryview]:
        """The rows the worker does not know: those admitted now, or all of them after a reset."""
        rows = self.scheduler.rows
        requests = step.new
        advance: dict[Request, int] = {}
        if self._needs_reset:
            requests = [r for r in rows.request[:rows.n] if r is not None]
            advance = dict(step.advance)
        if not requests:
            return [], EMPTY, EMPTY
        new, tokens, block_ids = [], bytearray(), []
        for request in requests:
            rows.flush(request)
            tokens += request.tokens
            block_ids += request.blocks
            new.append(NewRow(request.request_id, request.num_known_tokens, request.num_prompt_tokens,
                              int(rows.planned[request.row]) + advance.get(request, 0), len(request.blocks),
                              request.params, request.choice, request.is_shared))
        return new, memoryview(tokens), _pack(block_ids)

    def plan_sent(self, now_ns: int, planned_ns: int = 0) -> None:
        """Work that no plan waits for: call after the plan is on its way. `planned_ns`: when `plan` had returned."""
        in_flight = self.scheduler.rows.in_flight
        if in_flight:
            record = in_flight[-1]
            record.end_ns, record.sent_ns = planned_ns or now_ns, now_ns
            self.outbox.planned(record.step, (record.begin_ns, record.end_ns, now_ns, 0, 0, 0, 0, 0, 0, 0, 0,
                                              record.step, record.num_rows, record.num_tokens,
                                              record.num_prefill_tokens))
        self.scheduler.settle()

    def commit(self, result: ModelRunnerOutput, now_ns: int = 0) -> None:
        """Enter the result of the oldest plan in flight. Results of steps nobody waits for are counted and dropped."""
        scheduler = self.scheduler
        in_flight = scheduler.rows.in_flight
        if not in_flight or in_flight[0].step != result.step:
            scheduler.stats.num_late_results += 1
            return
        record = in_flight[0]
        tokens = np.frombuffer(result.tokens, np.int32)
        bad = np.frombuffer(result.bad_rows, np.int32)
        if record.drafted is None:
            scheduler.costs.observe(record.num_tokens, record.num_rows, result.device_ns)
        failed = {f.row: f for f in result.failed}
        errors = {request: (f.error_code, f.message) for row, f in failed.items()
                  if (request := owner(scheduler, record, row)) is not None}
        extras = self._extras(record, result)   # before rows move
        news = update(scheduler, self.stop, tokens, bad, np.fromiter(failed, np.int32, len(failed)),
                      np.frombuffer(result.ended_rows, np.int32), np.frombuffer(result.accepted, np.int32),
                      np.frombuffer(result.spec_token_ids, np.int32))
        self._is_blocked = False
        self.committed_step = result.step
        self.outbox.tokens(news.ids, news.index, news.tokens)
        # On a busy host the worker can have the plan before this process comes to note that it left.
        sent_ns = min(record.sent_ns, result.received_ns or record.sent_ns)
        self.outbox.step(result.step, (record.begin_ns, min(record.end_ns, sent_ns), sent_ns, result.received_ns,
                                       result.prepared_ns, result.launched_ns, result.done_ns, result.device_ns, now_ns,
                                       0, 0, result.step, record.num_rows, record.num_tokens,
                                       record.num_prefill_tokens))
        for number, kind, message in extras:
            self.outbox.extra(number, kind, message)
        for request, reason, token in news.done:
            code, text = 0, ""
            if reason == FINISH_ERROR:
                fault = FAULT, "the model produced values that are not finite for this request"
                code, text = errors.get(request, fault)
            self._report_end(request, reason, token, code, text)

    def committed(self, now_ns: int) -> None:
        """`commit` has returned: its end, for the timeline."""
        self.outbox.commit_ended(now_ns)

    def _extras(self, record: PlanRecord, result: ModelRunnerOutput) -> list[tuple[int, str, Any]]:
        """What few rows have besides a token: log-probabilities and vectors, addressed to their frontends."""
        found: list[tuple[int, str, Any]] = []
        for kind, rows in (("logprobs", result.logprobs), ("prompt_logprobs", result.prompt_logprobs)):
            for row in rows:
                request = owner(self.scheduler, record, row.row)
                if request is None:
                    continue
                if kind == "prompt_logprobs":
                    if row.position < request.num_prompt_logprobs:
                        continue                # computed again after a preemption; it was told before
                    request.num_prompt_logprobs = row.position + 1
                found.append((request.request_id >> NUMBER_SHIFT, kind, TokenLogprobs(
                    request.request_id, row.position, row.rank, row.token_ids, row.values)))
        for vector in result.pooled:
            request = owner(self.scheduler, record, vector.row)
            if request is not None:
                found.append((request.request_id >> NUMBER_SHIFT, "pooled", Pooled(request.request_id, vector.vector)))
        return found

    def abort_step(self, failure: StepFailed) -> None:
        """A step failed on the worker, which waits for a reset. Nothing in flight counts; who is to blame, ends.

        Named requests end with an error. When none is named, all of the step replay alone, one by one; one that fails
        again is the cause and ends.
        """
        scheduler = self.scheduler
        record = next((r for r in scheduler.rows.in_flight if r.step == failure.step), None)
        if record is None:
            scheduler.stats.num_late_results += 1
            return
        scheduler.stats.num_failed_steps += 1
        suspects = requests_of(scheduler, record)
        named = [self.requests[i] for i in failure.request_ids if i in self.requests]
        undo_in_flight(scheduler)
        self._needs_reset, self._is_blocked = True, False
        if named:
            self._blame(named, failure.reason)
        else:
            self._suspect(suspects, MAX_STEP_FAULTS, failure.reason)

    def worker_lost(self, reason: str = "the worker ended") -> None:
        """The worker and its pool are gone; a new one, with no rows, will take the next plan.

        A crash is a preemption of everyone. What the lost step computed is suspected to have caused it.
        """
        scheduler = self.scheduler
        in_flight = scheduler.rows.in_flight
        suspects = requests_of(scheduler, in_flight[0]) if in_flight else []
        forget_pool(scheduler)
        self.holds.release_all(scheduler.waiting)
        self._needs_reset = self._is_blocked = False
        self._suspect(suspects, MAX_LOST_WORKERS, reason)

    def worker_replaced(self) -> None:
        """The new worker is ready. Requests with a grammar, which it does not know, wait until it has compiled it:
        `holds.unasked` says what it is to be asked for, `grammar_prepared` when it answers."""
        self.holds.release_all(self.scheduler.waiting)      # whoever was asked before may never answer
        self.holds.hold(list(self.scheduler.waiting), self.scheduler.waiting)

    def grammar_prepared(self, grammar: bytes) -> None:
        """The worker has compiled this one, or knows that it does not compile."""
        self.holds.release(grammar, self.scheduler.waiting)
        self._is_blocked = False

    def _suspect(self, suspects: list[Request], max_faults: int, reason: str) -> None:
        """One of these may have caused a fault. Alone, it is known; else they replay one by one, which shows it."""
        scheduler = self.scheduler
        for request in suspects:
            request.num_faults += 1
        scheduler.num_batch_faults += len(suspects) > 1
        if len(suspects) == 1 and suspects[0].num_faults >= max_faults:
            self._blame(suspects, reason)
            scheduler.num_batch_faults = 0                      # the cause is found
        elif scheduler.num_batch_faults >= MAX_BATCH_FAULTS:    # each is harmless alone, together they are not
            self._blame(suspects, reason)
            scheduler.num_batch_faults = 0
        waiting = [r for r in scheduler.suspects if r not in suspects]      # theirs is still to come
        scheduler.suspects = [r for r in suspects + waiting if not r.is_finished]

    def _blame(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            self._end(request, FINISH_ERROR, code=FAULT, message=f"the worker failed on this request: {reason}")

    # ------------------------------------------------------------ outputs

    def take_outputs(self, now_ns: int) -> list[tuple[int, Outputs]]:
        """What there is to tell, per frontend. Cleared when `outbox.sent` says it left."""
        return self.outbox.take(self, now_ns)

    def beat(self, number: int, now_ns: int = 0) -> Outputs:
        """The idle heartbeat for one frontend, with steps that gave it nothing else to hear of."""
        outputs = self.fill(Outputs(self.committed_step))
        outputs.stamps = self.outbox.steps_for(number, now_ns)
        return outputs

    def fill(self, outputs: Outputs) -> Outputs:
        outputs.step = self.committed_step
        outputs.num_running, outputs.num_waiting = self.scheduler.rows.n, len(self.scheduler.waiting)
        outputs.num_free_blocks = self.scheduler.blocks.num_free
        return outputs

    # ------------------------------------------------------------ commands

    def _command(self, message: Command) -> CommandReply:
        call = self._commands.get(message.name)
        if call is None:
            return CommandReply(message.call_id, msgspec.Raw(_encode(None)),
                                f"unknown command {message.name!r}; known are {', '.join(self._commands)}")
        try:
            return CommandReply(message.call_id, msgspec.Raw(_encode(call(message))))
        except ValueError as error:
            return CommandReply(message.call_id, msgspec.Raw(_encode(None)), str(error))

    def _stats(self, _: Command) -> dict[str, Any]:
        scheduler = self.scheduler
        stats = scheduler.stats
        totals = {name: getattr(stats, name) for name in stats.__slots__}
        return {**totals, "hit_rate": stats.hit_rate, "num_running": scheduler.rows.n,
                "num_waiting": len(scheduler.waiting), "num_blocks": scheduler.blocks.num_blocks,
                "block_size": scheduler.blocks.block_size,
                "num_free_blocks": scheduler.blocks.num_free, "num_evicted_blocks": scheduler.blocks.num_evicted,
                "num_free_host_slots": scheduler.host.num_free}

    def _reset_prefix_cache(self, _: Command) -> bool:
        self.scheduler.reset_prefix_cache()
        self._is_stale = True
        return True

    def _request_status(self, message: Command) -> dict[str, Any]:
        request = self.requests.get(message.request_id)
        if request is None:
            raise ValueError(f"no live request {message.request_id}")
        return explain(self.scheduler, request)

    def _prefix_cache_stats(self, _: Command) -> dict[str, Any]:
        return self.scheduler.cache_log.report(self.scheduler.stats)

    def _dump_recording(self, _: Command) -> str:
        if self.on_dump is None:
            raise ValueError("this core has no flight recorder")
        return self.on_dump()

    def _check(self, _: Command) -> bool:
        """Run every invariant now. Raises RuntimeError, which ends the process: for tests and --paranoid runs."""
        self.scheduler.check_invariants(list(self.requests.values()))
        return True
