"""The whole core under any sequence of events that hypothesis can think of, shrunk to the shortest that fails.

After every event: I1 to I3 (blocks), I6 (budget, seats, nobody twice), I9 (the newest token is never cached), I10 (a
victim is not scheduled). In every step: I5 (each slot read holds the request's own history). At the end: I7 (work goes
on), I8 (idle means every block is free), and each request has exactly the tokens it has alone.
"""
from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from bench.sim_worker import SimWorker, expected_outputs
from ipc.messages import FINISH_ABORT, FINISH_ERROR, Abort, ModelRunnerOutput, SchedulerOutput
from bench.simulation import VOCAB, pack
from tests.engine_core.tools import Engine, pairs

SHARED = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


class SchedulerMachine(RuleBasedStateMachine):
    """An engine of few blocks, so that everything happens soon."""

    @initialize(num_blocks=st.integers(4, 9), block_size=st.sampled_from([1, 2, 4]), seats=st.integers(1, 4),
                budget=st.sampled_from([2, 5, 16]), threshold=st.sampled_from([0, 3]), caching=st.booleans(),
                policy=st.sampled_from(["fcfs", "priority", "lpm"]), mode=st.sampled_from(["recompute", "swap"]),
                is_async=st.booleans(), partial=st.booleans())
    def start(self, num_blocks: int, block_size: int, seats: int, budget: int, threshold: int, caching: bool,
              policy: str,
              mode: str, is_async: bool, partial: bool) -> None:
        self.sizes = (num_blocks, block_size, 5, VOCAB)
        self.budget, self.seats = budget, min(seats, budget)
        self.engine = Engine(num_blocks, block_size, num_host_blocks=5, caching=caching, partial=partial,
                             max_num_seqs=seats,
                             max_num_batched_tokens=budget, long_prefill_token_threshold=threshold, policy=policy,
                             preemption_mode=mode, async_scheduling=is_async, priority_aging_steps=5)
        self.sent: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.capacity = num_blocks * block_size
        self.num_faults = 0

    # ------------------------------------------------------------ events

    @rule(shared=st.integers(0, len(SHARED)), own=st.lists(st.integers(0, 9), max_size=4), count=st.integers(1, 9),
          min_tokens=st.integers(0, 3), stop=st.lists(st.integers(0, VOCAB - 1), max_size=3),
          priority=st.integers(0, 2))
    def add(self, shared: int, own: list[int], count: int, min_tokens: int, stop: list[int], priority: int) -> None:
        prompt = (SHARED[:shared] + own or [1])[:self.capacity]
        request_id = len(self.sent) + 1
        params = dict(max_tokens=count, min_tokens=min(min_tokens, count), stop_token_ids=stop)
        self.sent[request_id] = prompt, params
        self.engine.add(request_id, prompt, priority=priority, **params)

    @precondition(lambda self: self.engine.core.can_plan())
    @rule()
    def plan(self) -> None:
        engine = self.engine
        before = dict(engine.core.requests)
        plan = engine.core.plan()
        if plan is not None:
            engine.core.plan_sent(0)
            self.check_plan(plan)
            engine.in_flight.append(plan)
        assert all(request.row < 0 for request in before.values() if request.status.name == "PREEMPTED")
        engine.check()

    def check_plan(self, plan: SchedulerOutput) -> None:
        rows, counts = self.engine.rows, dict(pairs(plan.counts))
        assert sum(counts.get(row, 1) for row in range(plan.num_rows)) <= self.budget               # I6
        assert plan.num_rows == rows.n <= self.seats
        assert len(set(rows.ids[:rows.n].tolist())) == rows.n
        assert all(new.num_computed_tokens < new.num_tokens for new in plan.new)                    # I9
        assert all(0 <= row < plan.num_rows for row in counts)                                      # I10

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def execute(self) -> None:
        self.engine.finish_step()               # I5: the worker checks every slot it reads

    @precondition(lambda self: self.engine.in_flight)
    @rule(which=st.integers(0, 1), is_named=st.booleans(), data=st.data())
    def fail_step(self, which: int, is_named: bool, data: st.DataObject) -> None:
        engine = self.engine
        if which == 1 and len(engine.in_flight) == 2:
            engine.finish_step()
        plan = engine.in_flight[0]
        engine.worker.apply(plan)
        alive = sorted(engine.core.requests)
        named = (data.draw(st.sampled_from(alive)),) if is_named and alive else ()
        self.num_faults += 1
        engine.fail(plan, named)

    @rule()
    def lose_worker(self) -> None:
        engine = self.engine
        engine.in_flight.clear()
        engine.worker = SimWorker(*self.sizes)
        self.num_faults += bool(engine.rows.in_flight)          # a request that is there each time is suspected
        engine.core.worker_lost()
        engine.check()

    @precondition(lambda self: self.engine.core.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.core.handle(0, Abort([data.draw(st.sampled_from(sorted(self.engine.core.requests)))]))
        self.engine.take()
        self.engine.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.reset_prefix_cache()
        self.engine.check()

    @rule(offset=st.integers(1, 3))
    def late_result(self, offset: int) -> None:
        before = self.engine.stats.num_late_results
        self.engine.core.commit(ModelRunnerOutput(self.engine.core.step + offset, pack([1])))
        assert self.engine.stats.num_late_results == before + 1

    # ------------------------------------------------------------ the end

    def teardown(self) -> None:
        if not hasattr(self, "sent"):
            return
        engine = self.engine
        engine.run(3000)                                                                            # I7
        engine.assert_idle()                                                                        # I8
        for request_id, (prompt, params) in self.sent.items():
            end, got = engine.ends[request_id], engine.tokens[request_id]
            count = min(params["max_tokens"], self.capacity + 1 - len(prompt))
            expected = expected_outputs(prompt, count, VOCAB, frozenset(params["stop_token_ids"]), params["min_tokens"])
            if end.reason in (FINISH_ABORT, FINISH_ERROR):
                assert got == expected[:len(got)] and (end.reason == FINISH_ABORT or self.num_faults)
            else:
                assert got == expected


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
