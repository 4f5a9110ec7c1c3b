"""A mirror that also makes every batch on the device and compares it with the host's, while results arrive late."""
from __future__ import annotations

import random

import numpy as np
import torch

from bench.simulation import FaultyWorker, Options, Simulation, unpack
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from tests.worker.mirror import MirrorWorker
from worker.batch import Batch
from worker.decode_graphs import DecodeGraphs
from worker.device_rows import ResidentBuilder
from worker.request_state import RequestState, Unread
from worker.row_ops import RowOps


class ResidentMirror(MirrorWorker):
    """Raises AssertionError at the first difference. `seen`: kinds of plans and steps that came up."""

    def __init__(self, sizes: tuple[int, ...], seats: int, budget: int, max_model_len: int, row_ops: RowOps,
                 seed: int) -> None:
        super().__init__(*sizes, seats, budget, max_model_len)
        self.random = random.Random(seed)
        self.late_state = RequestState(seats, max_model_len, self.block_size)
        self.resident = ResidentBuilder(self.late_state, budget, "cpu", row_ops)
        graphs = DecodeGraphs("static", seats, lambda batch: torch.empty(0), self.resident.blank)
        self.resident.pad = lambda n: graphs.padded(n) if self.random.random() < 0.5 else None
        self.late: tuple[Unread, np.ndarray] | None = None
        self.device_batch: Batch | None = None
        self.seen: set[str] = set()
        self.num_batches = 0

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        self.seen |= {name for name in ("moves", "new", "extend", "advance", "counts", "reset", "spec_token_ids")
                      if getattr(plan, name)}
        self.seen |= {"preempted" for new in plan.new if new.num_tokens > new.num_prompt_tokens}
        if plan.spec_token_ids:                 # they follow tokens that the step before must have
            self.settle()
        self.resident.apply(plan)
        sent = 0

        def send(parts: list[np.ndarray]) -> torch.Tensor:
            nonlocal sent
            sent += 1
            return torch.from_numpy(np.concatenate(parts).astype(np.int32))
        ring, self.resident.ring.send = self.resident.ring.send, send   # type: ignore[method-assign, assignment]
        self.device_batch = self.resident.build(plan)
        self.resident.ring.send = ring          # type: ignore[method-assign]
        if self.device_batch is not None and not plan.counts:
            self.seen |= {"decode"} | ({"no copy"} if not sent else set())
        self.settle()
        self.compare_with_host()

    def settle(self) -> None:
        """The result of the step before arrives."""
        if self.late is not None:
            self.seen.add("unread")
            self.late_state.fill(*self.late)
            self.late = None

    def compare_with_host(self) -> None:
        host, ours = self.batch, self.device_batch
        if host is None or ours is None:
            assert host is ours
            return
        self.num_batches += 1
        n, rows = host.num_tokens, host.meta.num_reqs
        padded = ours.meta.num_reqs
        assert ours.num_tokens == n and padded >= rows
        if padded > rows:
            self.seen.add("padded")
            assert not ours.input_ids[n:].any() and (ours.meta.slot_mapping[n:] == -1).all()
            assert not ours.meta.seq_lens[rows:].any() and not ours.meta.seq_lens_cpu[rows:].any()
        assert ours.input_ids[:n].tolist() == host.input_ids.tolist()
        assert ours.positions[:n].tolist() == host.positions.tolist()
        assert ours.meta.slot_mapping[:n].tolist() == host.meta.slot_mapping.tolist()
        assert ours.meta.query_start_loc[:rows + 1].tolist() == host.meta.query_start_loc.tolist()
        assert ours.meta.query_start_loc_cpu.tolist() == ours.meta.query_start_loc.tolist()
        assert ours.meta.seq_lens[:rows].tolist() == host.meta.seq_lens.tolist()
        assert ours.meta.seq_lens_cpu.tolist() == ours.meta.seq_lens.tolist()
        assert ours.meta.block_table[:rows].tolist() == host.meta.block_table.tolist()
        assert (ours.meta.max_query_len, ours.meta.max_seq_len) == (host.meta.max_query_len, host.meta.max_seq_len)
        assert ours.sample_rows.tolist() == host.sample_rows.tolist()
        if host.logits_index is not None:
            assert ours.logits_index is not None and ours.logits_index.tolist() == host.logits_index.tolist()
            assert ours.device_rows is not None and ours.device_rows.tolist() == host.sample_rows.tolist()
        assert (ours.last is None) == (host.last is None)
        if ours.last is not None and host.last is not None:
            self.seen.add("parted")
            assert ours.last.rows.tolist() == host.last.rows.tolist()
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
                assert getattr(ours.last.meta, name).tolist() == getattr(host.last.meta, name).tolist()
            for name in ("query_start_loc_cpu", "seq_lens_cpu"):
                assert getattr(ours.last.meta, name).tolist() == getattr(ours.last.meta, name[:-4]).tolist()
            assert ours.last.meta.max_seq_len == host.last.meta.max_seq_len and ours.last.meta.decode_only

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(plan)
        batch = self.device_batch
        if batch is not None and batch.offsets is not None:
            column, accepted = self.resident.advance(batch, self.sampled(self.known))
            assert column.tolist() == unpack(result.tokens) and accepted.tolist() == unpack(result.accepted)
        elif batch is not None:
            tokens = np.frombuffer(result.tokens, np.int32)[batch.sample_rows]
            self.resident.sampled(batch, torch.from_numpy(tokens.copy()))
            self.late = self.late_state.count(batch.counts, batch.sample_rows), tokens
            if self.random.random() < 0.2:      # sampled by the host: known at once
                self.late_state.fill(*self.late)
                self.late = None
        return result


class ResidentSimulation(Simulation):
    """The random driver with this mirror."""

    row_ops: RowOps

    def make_worker(self) -> FaultyWorker:
        return ResidentMirror(self.sizes, self.seats, self.budget, self.max_model_len, self.row_ops, self.seed)


def compare_resident(seed: int, options: Options, row_ops: RowOps) -> ResidentMirror:
    """The mirror after one simulation in which every batch was compared."""
    simulation_type = type("_Simulation", (ResidentSimulation,), {"row_ops": row_ops})
    simulation = simulation_type(seed, options)
    simulation.run()
    assert isinstance(simulation.worker, ResidentMirror)
    return simulation.worker
