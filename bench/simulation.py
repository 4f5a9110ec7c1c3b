"""Drives a real EngineCore against bench.sim_worker through the codec, at random: sizes, policies, modes, aborts,
resets, failed steps, lost workers, values that are not finite, late results, grammars.

Everything is drawn from one seed, and every failure names it. What is checked: no slot is read that does not hold the
request's own history; every request ends once, with exactly the tokens it has alone; core and worker agree about the
rows of every plan; budget, seats and all invariants hold after every step; idle means every block is free.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import msgspec
import numpy as np

from bench.sim_accounts import Accounts
from bench.sim_worker import SimRow, SimWorker, expected_outputs
from engine_core.core import EngineCore
from ipc import codec
from ipc.config import CacheConfig, SchedulerConfig
from ipc.errors import FAULT, INVALID, OVERLOADED
from ipc.messages import (
    EMPTY,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    Abort,
    AddRequest,
    Command,
    Finished,
    ModelRunnerOutput,
    SchedulerOutput,
    StepFailed,
    WorkerReady,
)
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs

VOCAB, EOS = 50, 7
GRAMMARS = [StructuredOutputs(regex=f"[a-z]{{{i + 1}}}") for i in range(3)]  # for the core alone: nobody follows them
NOT_FINITE = -2  # what a slot means when its keys and values are NaN


def pack(values: Any, dtype: type = np.int32) -> memoryview:
    """Numbers as a packed column."""
    return np.array(values, dtype).data.cast("B")


def unpack(column: Any, dtype: type = np.int32) -> list[int]:
    result: list[int] = np.frombuffer(column, dtype).tolist()
    return result


def over_the_wire(message: Any) -> Any:
    return codec.decode(codec.encode(message))[1]


class SimulationError(AssertionError):
    """What went wrong, with the seed that shows it again."""


@dataclasses.dataclass(slots=True)
class Options:
    """Rates are per step. None: drawn from the seed."""

    fault_rate: float = 0.0  # a step raises; the worker may have written garbage by then
    nan_rate: float = 0.0  # a sampled row's values are not finite
    loss_rate: float = 0.0  # the worker and its pool are gone
    restart_rate: float = 0.0  # the core ends; a new one is told every live request again
    late_rate: float = 0.0  # an old or unknown result arrives again
    abort_rate: float = 0.02
    reset_rate: float = 0.01
    gone_rate: float = 0.0  # a frontend disappears
    poison_rate: float = 0.0  # share of requests whose steps always fail
    grammar_rate: float = 0.0  # share of requests with a grammar, which a new worker has to compile first
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    preemption_mode: str | None = None
    policy: str | None = None
    speculation: int | None = None  # drafts a step
    num_requests: int | None = None
    bounded_queue: bool = True
    max_rounds: int = 20_000


@dataclasses.dataclass(slots=True)
class Statistics:
    num_steps: int = 0  # executed, failed ones included
    num_requests: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_failed: int = 0
    num_bad_rows: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_kept_tokens: int = 0  # that restarts of the core did not cost
    num_late: int = 0
    num_aborted: int = 0
    num_hit_tokens: int = 0
    num_accepted_tokens: int = 0
    num_checked_slots: int = 0

    def __iadd__(self, other: Statistics) -> Statistics:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


class FaultyWorker(SimWorker):
    """A SimWorker whose rows may be hit by values that are not finite. They spread to every row that reads them, and to
    what such rows write; sampled rows among them are reported as bad."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hit: set[int] = set()  # request ids whose newest slot is not finite, if this step samples it
        self.tainted: set[int] = set()  # request ids that read or wrote NaN in this step

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.tainted = set()
        result = super().execute(plan)
        self.hit.clear()
        if not self.tainted:
            return result
        tokens = unpack(result.tokens)
        bad = [i for i, row in enumerate(self.rows) if row.request_id in self.tainted and tokens[i] >= 0]
        for i in bad:
            self.rows[i].is_reusable = False
            tokens[i] = -1  # the row goes on with some token: plans in flight still compute it
        accepted, proposals = (
            [x for pair in zip(column[::2], column[1::2]) if pair[0] not in bad for x in pair]
            for column in (unpack(result.accepted), unpack(result.spec_token_ids))
        )
        return ModelRunnerOutput(
            plan.step,
            pack(tokens),
            pack(bad) if bad else EMPTY,
            accepted=pack(accepted),
            spec_token_ids=pack(proposals),
        )

    def _check(self, step: int, row: SimRow) -> None:
        if self.hit:  # rows are checked when all have written: spread to a fixed point
            self._spread()
        if row.request_id in self.tainted or self._reads_nan(row):
            self.tainted.add(row.request_id)
            self._taint(row, row.computed - 1)
        else:
            super()._check(step, row)

    def _spread(self) -> None:
        before = -1
        for row in self.rows:
            if row.request_id in self.hit and row.computed == len(row.tokens):
                self.tainted.add(row.request_id)
                self._taint(row, row.computed - 1)
        while before != len(self.tainted):
            before = len(self.tainted)
            for row in self.rows:
                if row.request_id not in self.tainted and self._reads_nan(row):
                    self.tainted.add(row.request_id)
                    self._taint(row, row.computed - 1)
        self.hit.clear()

    def _reads_nan(self, row: SimRow) -> bool:
        size = self.block_size
        return any(self.pool[row.blocks[p // size]][p % size] == NOT_FINITE for p in range(row.computed))

    def _taint(self, row: SimRow, position: int) -> None:
        self.pool[row.blocks[position // self.block_size]][position % self.block_size] = NOT_FINITE

    def fail(self, plan: SchedulerOutput, rng: random.Random) -> None:
        """Raise in the middle of a step: some of its slots hold garbage."""
        self.apply(plan)
        counts = dict(zip(unpack(plan.counts)[::2], unpack(plan.counts)[1::2]))
        for index, row in enumerate(self.rows):
            for p in range(row.computed, min(row.computed + counts.get(index, 1), len(row.tokens))):
                if rng.random() < 0.5:
                    self.pool[row.blocks[p // self.block_size]][p % self.block_size] = rng.randrange(1 << 40)
        self.needs_reset = True


@dataclasses.dataclass(slots=True)
class Sent:
    """A request as the frontends know it."""

    message: AddRequest
    prompt: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    end: Finished | None = None
    is_aborted: bool = False
    is_gone: bool = False  # its frontend has left: no outputs reach anyone
    is_poison: bool = False


class Simulation:
    """One engine from first request to idle."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed, self.options, self.rng = seed, options, random.Random(seed)
        self.request_rng = random.Random(-1 - seed)
        self.grammar_rng = random.Random(seed * 2 + 3)  # of its own, as that of drafts
        self.asked: list[bytes] = []  # grammars that the worker compiles
        rng = self.rng
        self.block_size = rng.choice([1, 2, 4, 8, 16])
        self.num_blocks = rng.randint(6, 60)
        num_host = rng.choice([1, 8, 40])
        mode = options.preemption_mode or rng.choice(["recompute", "swap", "auto"])
        self.max_model_len = rng.choice([40, 500])
        self.budget = rng.choice([4, 8, 16, 64, 256])
        is_async = rng.random() < 0.6
        spec_rng = random.Random(seed * 2 + 1)  # of its own: older seeds keep their requests
        num_drafts = spec_rng.choice([0, 0, 1, 3, 6])
        num_drafts = min(num_drafts if options.speculation is None else options.speculation, self.block_size - 1)
        scheduler = SchedulerConfig(
            max_num_seqs=rng.choice([1, 2, 5, 16]),
            max_num_batched_tokens=self.budget,
            enable_chunked_prefill=rng.random() < 0.85,
            long_prefill_token_threshold=rng.choice([0, 0, 3, 8]),
            policy=options.policy or rng.choice(["fcfs", "priority", "lpm"]),
            preemption_mode=mode,
            priority_aging_steps=rng.choice([1, 10, 1000]),
            lpm_max_overtakes=rng.choice([1, 4]),
            max_num_queued_reqs=rng.choice([0, 0, 8]) if options.bounded_queue else 0,
            max_num_queued_tokens=rng.choice([0, 0, 300]) if options.bounded_queue else 0,
            async_scheduling=is_async if options.async_scheduling is None else options.async_scheduling,
            max_plans_in_flight=spec_rng.choice([2, 2, 3, 4]),
            num_speculative_tokens=num_drafts,
        )
        caching = rng.random() < 0.8
        cache = CacheConfig(
            block_size=self.block_size,
            swap_space=1,
            enable_partial_reuse=rng.random() < 0.7,
            enable_prefix_caching=caching if options.enable_prefix_caching is None else options.enable_prefix_caching,
        )
        self.sizes = (self.num_blocks, self.block_size, num_host, VOCAB, num_drafts)
        self.seats = min(scheduler.max_num_seqs, self.budget)
        self.ready = WorkerReady(
            self.num_blocks,
            num_host,
            self.max_model_len,
            VOCAB,
            [EOS],
            "float32",
            "simulated",
            swap_block_ns=rng.choice([0, 1_000, 1_000_000]),
        )
        self.core = EngineCore(scheduler, cache, self.ready, b"k" * 32)
        self.config, self.cache = scheduler, cache
        self.accounts = Accounts()
        self.worker = self.make_worker()
        self.in_flight: collections.deque[tuple[SchedulerOutput, list[int]]] = collections.deque()
        self.old_results: list[ModelRunnerOutput] = []
        self.sent: dict[int, Sent] = {}
        self.returning: list[int] = []  # live requests that a new core has not been told yet
        self.may_error: set[int] = set()  # bad rows of the step that was hit
        self.statistics = Statistics()
        self.num_requests = options.num_requests or rng.randint(5, 60)
        self.counter = 0
        self.shared = [rng.randrange(VOCAB) for _ in range(60)]

    def make_worker(self) -> FaultyWorker:
        return FaultyWorker(*self.sizes)

    def run(self) -> Statistics:
        """Raises SimulationError, naming the seed, for anything that is wrong."""
        try:
            rounds = 0
            while (
                len(self.sent) < self.num_requests
                or self.core.requests
                or self.in_flight
                or self.returning
            ):
                self._round()
                rounds += 1
                self._expect(rounds < self.options.max_rounds, "no end")
            self._take_outputs()
            self._check_end()
        except Exception as error:
            raise SimulationError(f"seed {self.seed} with {self.options}: {type(error).__name__}: {error}") from error
        stats = self.core.scheduler.stats
        mine = self.statistics
        mine.num_requests = len(self.sent)
        mine.num_preemptions += stats.num_preemptions
        mine.num_kept_tokens += stats.num_replayed_hit_tokens
        mine.num_swapped_blocks, mine.num_hit_tokens = stats.num_swapped_out_blocks, stats.num_hit_tokens
        mine.num_accepted_tokens += stats.num_accepted_tokens
        mine.num_checked_slots += self.worker.num_checked_slots
        return mine

    def _expect(self, is_true: object, what: str) -> None:
        if not is_true:
            raise SimulationError(what)

    # ------------------------------------------------------------ one round

    def _round(self) -> None:
        rng, options, core = self.rng, self.options, self.core
        if len(self.sent) < self.num_requests and rng.random() < 0.4:
            self._add()
        if self.returning:
            self._add_again(0.3)
        if self.sent and rng.random() < options.abort_rate:
            self._abort(rng.choice(list(self.sent)))
        if rng.random() < options.reset_rate:
            core.handle(0, Command(1, "reset_prefix_cache"))
        if rng.random() < options.gone_rate:
            self._frontend_gone(rng.randrange(2))
        if rng.random() < options.late_rate:
            self._late()
        self._compile()
        while core.can_plan():
            plan = core.plan()
            if plan is None:
                break
            self.accounts.planned(plan)
            self.in_flight.append((over_the_wire(plan), core.scheduler.rows.ids[: plan.num_rows].tolist()))
            if rng.random() < 0.9:
                core.plan_sent(0)
        if self.sent and rng.random() < options.abort_rate:  # with plans in flight
            self._abort(rng.choice(list(self.sent)))
        if rng.random() < options.loss_rate:
            self._lose_worker()
        if rng.random() < options.restart_rate:
            self._restart_core()
        if self.in_flight:
            self._step(*self.in_flight.popleft())
        self._take_outputs()
        core.scheduler.check_invariants(list(core.requests.values()))

    def _step(self, plan: SchedulerOutput, ids: list[int]) -> None:
        rng, worker, core = self.rng, self.worker, self.core
        self.statistics.num_steps += 1
        self._check_plan(plan, ids)
        poisoned = [i for i in self._computing(plan, ids) if self.sent[i].is_poison]
        if poisoned or rng.random() < self.options.fault_rate:
            worker.fail(plan, rng)
            self.in_flight.clear()  # the worker ignores them
            named = poisoned if rng.random() < 0.3 else []
            self.statistics.num_failed += 1
            self.accounts.num_failed += 1
            core.abort_step(over_the_wire(StepFailed(plan.step, "boom", request_ids=named)))
            return
        is_hit = rng.random() < self.options.nan_rate
        if is_hit:
            worker.hit = set(rng.sample(ids, 1))
        result = worker.execute(plan)
        result.device_ns = 100_000 + 3_000 * plan.num_rows  # what `auto` weighs
        self._expect([row.request_id for row in worker.rows] == ids, f"step {plan.step}: rows differ")
        bad = unpack(result.bad_rows)
        self.statistics.num_bad_rows += len(bad)
        if is_hit:
            self.may_error.update(ids[row] for row in bad)
        self.old_results = [*self.old_results[-5:], result]
        self.accounts.committed(plan, result)
        core.commit(over_the_wire(result))

    def _computing(self, plan: SchedulerOutput, ids: list[int]) -> list[int]:
        counts = dict(zip(unpack(plan.counts)[::2], unpack(plan.counts)[1::2]))
        return [i for row, i in enumerate(ids) if counts.get(row, 1)]

    def _check_plan(self, plan: SchedulerOutput, ids: list[int]) -> None:
        held = [i for i in ids if i in self.core.requests and self.core.requests[i].is_held]
        self._expect(not held, f"{held} have rows, and their grammars are being compiled")
        counts = dict(zip(unpack(plan.counts)[::2], unpack(plan.counts)[1::2]))
        self._expect(sum(counts.get(row, 1) for row in range(len(ids))) <= self.budget, "a step above its budget")
        self._expect(len(ids) <= self.seats and len(set(ids)) == len(ids), "too many rows, or one twice")
        for new in plan.new:
            self._expect(new.num_computed_tokens < new.num_tokens, "the newest token came from the cache")

    # ------------------------------------------------------------ what happens from outside

    def _add(self) -> None:
        rng = self.request_rng  # so that the requests do not depend on how steps pass
        number = rng.randrange(2)
        request_id = number << 40 | self.counter
        length = rng.randint(1, max(1, min(self.max_model_len - 1, self.num_blocks * self.block_size, 60)))
        prompt = (self.shared[: rng.randint(0, length)] + [rng.randrange(VOCAB) for _ in range(length)])[:length]
        max_tokens = rng.choice([None, 1, 2, 10, 30])
        min_tokens = rng.choice([0, 0, 3])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            ignore_eos=rng.random() < 0.5,
            seed=1,
            stop_token_ids=rng.choice([[], [3], [3, 9]]),
            structured_outputs=self._grammar(),
        )
        message = AddRequest(
            request_id,
            pack(prompt),
            params,
            priority=rng.randint(0, 2),
            num_choices=rng.choice([1, 1, 1, 3]),
            cache_salt=rng.choice(["", "", "a"]),
        )
        is_poison = rng.random() < self.options.poison_rate
        for choice in range(message.num_choices):
            self.sent[request_id + choice] = Sent(message, prompt, is_poison=is_poison)
        self.counter += message.num_choices
        self.core.handle(number, over_the_wire(message))

    def _grammar(self) -> StructuredOutputs | None:
        if self.grammar_rng.random() >= self.options.grammar_rate:
            return None
        return self.grammar_rng.choice(GRAMMARS)

    def _abort(self, request_id: int) -> None:
        sent = self.sent[request_id]
        if sent.end is None:
            sent.is_aborted = True
            self.statistics.num_aborted += 1
        self.core.handle(request_id >> 40, Abort([request_id, 1 << 39]))

    def _frontend_gone(self, number: int) -> None:
        for request_id, sent in self.sent.items():
            if request_id >> 40 == number and sent.end is None:
                sent.is_gone = True
        self.core.frontend_gone(number)

    def _late(self) -> None:
        self.statistics.num_late += 1
        before = self.core.scheduler.stats.num_late_results
        if self.old_results and self.rng.random() < 0.5:
            self.core.commit(self.rng.choice(self.old_results))
        elif self.rng.random() < 0.5:
            self.core.commit(ModelRunnerOutput(self.core.step + 5, pack([1, 2])))
        else:
            self.core.abort_step(StepFailed(self.core.step + 7, "late"))
        self._expect(self.core.scheduler.stats.num_late_results == before + 1, "a late result was not counted")

    def _lose_worker(self) -> None:
        self.statistics.num_lost += 1
        self.statistics.num_checked_slots += self.worker.num_checked_slots
        self.worker = self.make_worker()
        self.in_flight.clear()
        self.asked.clear()
        self.core.worker_lost()
        self.core.worker_replaced()

    def _compile(self) -> None:
        """The worker is told of grammars, and is done with some."""
        self.asked += self.core.holds.unasked
        self.core.holds.unasked.clear()
        for grammar in self.asked[:]:
            if self.grammar_rng.random() < 0.2:
                self.asked.remove(grammar)
                self.core.grammar_prepared(grammar)

    def _restart_core(self) -> None:
        """The core ends with whatever it had not told. Its successor shares the worker, which tells it what its rows
        were and drops them, and is told every live request as prompt + tokens received."""
        old = self.core
        self.statistics.num_restarts += 1
        self.statistics.num_preemptions += old.scheduler.stats.num_preemptions
        self.statistics.num_kept_tokens += old.scheduler.stats.num_replayed_hit_tokens
        self.core = EngineCore(old.config, self.cache, self.ready, b"k" * 32)
        self.accounts = Accounts()
        self.asked.clear()
        self.core.kept.take(over_the_wire(self.worker.kept(self.ready)), self.core.scheduler.blocks)
        self.worker.drop_rows()
        self.in_flight.clear()
        self.old_results.clear()
        self.returning = list(self.sent)
        self._add_again(0.7)

    def _add_again(self, share: float) -> None:
        """Some of the former core's requests come back now, the others later."""
        later = []
        for request_id in self.returning:
            sent = self.sent[request_id]
            if sent.end is not None or sent.is_gone:
                continue
            if sent.is_aborted:  # nobody waits for it any more
                sent.end = Finished(request_id, FINISH_ABORT)
            elif self.rng.random() > share:
                later.append(request_id)
            else:
                message = msgspec.structs.replace(
                    sent.message,
                    request_id=request_id,
                    choice=sent.message.choice + request_id - sent.message.request_id,
                    num_choices=1,
                    output_token_ids=pack(sent.tokens),
                    is_replay=True,
                )
                self.core.handle(request_id >> 40, over_the_wire(message))
        self.returning = later

    # ------------------------------------------------------------ what the frontends see

    def _take_outputs(self) -> None:
        for number, outputs in self.core.take_outputs(0):
            if self.rng.random() < 0.1:
                continue  # this frontend cannot take more now: it stays pending
            outputs = over_the_wire(outputs)
            self.core.outbox.sent(number)
            for request_id, index, token in zip(
                unpack(outputs.request_ids, np.int64), unpack(outputs.output_index), unpack(outputs.tokens)
            ):
                sent = self.sent[request_id]
                self._expect(sent.end is None, f"{request_id}: a token after its end")
                self._expect(not sent.is_gone, f"{request_id}: a token for a frontend that left")
                self._expect(len(sent.tokens) == index, f"{request_id}: token {index} after {len(sent.tokens)} tokens")
                sent.tokens.append(token)
            for end in outputs.finished:
                self._expect(self.sent[end.request_id].end is None, f"{end.request_id}: ended twice")
                self.sent[end.request_id].end = end

    def _check_end(self) -> None:
        core = self.core
        for _ in range(100):  # a frontend that was busy
            self._take_outputs()
        core.handle(0, Command(2, "check"))
        self._expect(core.scheduler.blocks.num_free == self.num_blocks, "idle, and blocks are not free")
        core.scheduler.host.next_plan()
        self._expect(core.scheduler.host.num_free == self.sizes[2], "idle, and host slots are not free")
        self._expect(not core.requests and not core.scheduler.has_work, "idle, and requests are left")
        is_complete = not self.statistics.num_restarts and not any(sent.is_gone for sent in self.sent.values())
        ends = [sent.end for sent in self.sent.values() if sent.end is not None] if is_complete else None
        wrong = self.accounts.differences(core.scheduler.stats, self.block_size, ends)
        self._expect(not wrong, "; ".join(wrong))
        for request_id, sent in self.sent.items():
            if not sent.is_gone:
                self._check_request(request_id, sent)

    def _check_request(self, request_id: int, sent: Sent) -> None:
        params, prompt, end = sent.message.sampling_params, sent.prompt, sent.end
        if end is None:
            raise SimulationError(f"{request_id}: no end")
        room = min(self.max_model_len, self.num_blocks * self.block_size + 1) - len(prompt)
        count = room if params.max_tokens is None else min(room, params.max_tokens)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset([EOS]))
        expected = expected_outputs(prompt, count, VOCAB, stops, params.min_tokens)
        told = f"{request_id}: prompt of {len(prompt)}, {params}: {sent.tokens}, not {expected}; {end}"
        if end.reason == FINISH_ERROR:
            if end.error_code in (INVALID, OVERLOADED):
                bounded = self.config.max_num_queued_reqs or self.config.max_num_queued_tokens
                self._expect(
                    bounded
                    if end.error_code == OVERLOADED
                    else not self.config.enable_chunked_prefill and len(prompt) > self.budget,
                    f"{request_id} refused: {end.message}",
                )
                self._expect(not sent.tokens, told)
                return
            self._expect(
                end.error_code == FAULT
                and (
                    self.options.fault_rate + self.options.loss_rate > 0
                    or sent.is_poison
                    or request_id in self.may_error
                ),
                told,
            )
            self._expect(sent.tokens == expected[: len(sent.tokens)], told)
        elif end.reason == FINISH_ABORT:
            self._expect(sent.is_aborted and sent.tokens == expected[: len(sent.tokens)], told)
        else:
            self._expect(sent.tokens == expected and not sent.is_poison, told)
            is_stopped = sent.tokens[-1] in stops and len(sent.tokens) >= params.min_tokens
            self._expect(
                (end.reason, end.stop_token_id)
                == ((FINISH_STOP, sent.tokens[-1]) if is_stopped else (FINISH_LENGTH, -1)),
                told,
            )


def simulate(seed: int, options: Options | None = None) -> Statistics:
    """One simulation; what it did."""
    return Simulation(seed, options or Options()).run()


def simulate_steps(num_steps: int, first_seed: int, options: Options) -> Statistics:
    """Simulations of consecutive seeds until `num_steps` steps were executed."""
    total = Statistics()
    while total.num_steps < num_steps:
        total += simulate(first_seed, options)
        first_seed += 1
    return total
