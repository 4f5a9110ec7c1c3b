"""A simulated worker that also keeps the real worker's rows and builds its batches, and compares both at every plan.

bench.sim_worker reads plans in its own plain way, with lists; worker.request_state and worker.batch are numpy. Plans
come from a real engine core under random load.
"""
from __future__ import annotations

import numpy as np

from bench.sim_worker import extend_history, next_token
from ipc.messages import ModelRunnerOutput, NewRow, SchedulerOutput, WorkerReady
from bench.simulation import FaultyWorker, Options, Simulation, unpack
from worker.batch import Batch, BatchBuilder
from worker.kept_rows import with_kept_rows
from worker.request_state import RequestState


class MirrorWorker(FaultyWorker):
    """Raises AssertionError at the first difference."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int, vocab_size: int,
                 num_speculative_tokens: int, seats: int, budget: int, max_model_len: int) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks, vocab_size, num_speculative_tokens)
        self.state = RequestState(seats, max_model_len, block_size)
        self.builder = BatchBuilder(self.state, budget)
        self.new: dict[int, NewRow] = {}
        self.batch: Batch | None = None
        self.drafts: dict[int, list[int]] = {}
        self.known = np.zeros(0, np.int64)
        self.num_compared = self.num_decode_batches = self.num_drafted = self.num_kept_rows = 0

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        self.new.update({new.request_id: new for new in plan.new})
        self.state.apply(plan)
        self.known = self.state.known.copy()
        self.compare_rows()
        self.batch = self.builder.build(plan)
        self.compare_batch(plan)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = super().execute(plan)
        column, accepted = self.builder.advance(self.batch, self.sampled(self.known))
        assert column.tolist() == unpack(result.tokens) and accepted.tolist() == unpack(result.accepted)
        assert not self.state.num_drafts.any()
        self.state.is_reusable[unpack(result.bad_rows)] = False
        self.compare_rows()
        return result

    def kept(self, ready: WorkerReady) -> WorkerReady:
        kept = super().kept(ready)
        mine = with_kept_rows(ready, self.state, is_sound=not self.needs_reset)
        assert (mine.kept, bytes(mine.kept_tokens), bytes(mine.kept_blocks)) == (
            kept.kept, bytes(kept.kept_tokens), bytes(kept.kept_blocks))
        self.num_kept_rows += len(kept.kept)
        return kept

    def drop_rows(self) -> None:
        super().drop_rows()
        self.state.clear()

    def sampled(self, known: np.ndarray) -> np.ndarray:
        """What the model says at each logit: after the row's known tokens, and after each of its drafts."""
        found = []
        for row in dict.fromkeys(self.batch.sample_rows.tolist() if self.batch is not None else []):
            h = self.rows[row].history[int(known[row]) - 1]
            for draft in [*self.drafts.get(row, []), None]:
                found.append(next_token(h, self.vocab_size))
                if draft is not None:
                    h = extend_history(h, draft)
        return np.array(found, np.int32)

    def compare_rows(self) -> None:
        state = self.state
        assert state.n == len(self.rows)
        with_floor = 0
        for i, row in enumerate(self.rows):
            new = self.new[row.request_id]
            params = new.sampling_params
            assert (state.request_id[i], state.computed[i], state.known[i]) == (row.request_id, row.computed,
                                                                                len(row.tokens))
            assert state.tokens[i, :len(row.tokens)].tolist() == row.tokens
            assert state.num_blocks[i] == len(row.blocks)
            table = state.block_table[i]
            assert table[:len(row.blocks)].tolist() == row.blocks
            assert not table[len(row.blocks):].any()            # padded with the null block
            assert (state.num_prompt[i], state.floor[i]) == (new.num_prompt_tokens,
                                                             new.num_prompt_tokens + params.min_tokens)
            assert (state.temperature[i], state.top_p[i], state.min_p[i], state.top_k[i]) == (
                np.float32(params.temperature), np.float32(params.top_p), np.float32(params.min_p), params.top_k)
            assert (state.seed[i], state.choice[i], state.masks_eos[i]) == (params.seed, new.choice,
                                                                            not params.ignore_eos)
            assert state.is_reusable[i] == row.is_reusable
            assert state.stop_ids[i] == params.stop_token_ids
            with_floor += params.min_tokens > 0
        assert state.num_with_floor == with_floor
        assert not state.block_table[len(self.rows):].any()

    def compare_batch(self, plan: SchedulerOutput) -> None:
        counts = dict(zip(unpack(plan.counts)[::2], unpack(plan.counts)[1::2]))
        size, batch = self.block_size, self.batch
        self.drafts = {}
        for i, token in zip(unpack(plan.spec_token_ids)[::2], unpack(plan.spec_token_ids)[1::2]):
            self.drafts.setdefault(i, []).append(token)
        self.num_drafted += len(self.drafts)
        offsets = []
        ids, positions, slots, starts, lengths, tables = [], [], [], [0], [], []
        logits_index, sample_rows = [], []
        for i, row in enumerate(self.rows):
            n = counts.get(i, 1)
            if n == 0:
                continue
            for p in range(row.computed, row.computed + n):
                ids.append((row.tokens + self.drafts.get(i, []))[p])
                positions.append(p)
                slots.append(row.blocks[p // size] * size + p % size)
            starts.append(len(ids))
            lengths.append(row.computed + n)
            tables.append(row.blocks)
            num_drafts = len(self.drafts.get(i, []))
            if lengths[-1] == len(row.tokens) + num_drafts:
                logits_index += range(len(ids) - 1 - num_drafts, len(ids))
                sample_rows += [i] * (1 + num_drafts)
                offsets += range(1 + num_drafts)
        if not ids:
            assert batch is None
            return
        assert batch is not None and batch.num_tokens == len(ids)
        assert batch.input_ids.tolist() == ids and batch.positions.tolist() == positions
        meta = batch.meta
        assert meta.slot_mapping.tolist() == slots and meta.query_start_loc.tolist() == starts
        assert meta.seq_lens.tolist() == lengths and meta.num_reqs == len(lengths)
        assert meta.query_start_loc_cpu.tolist() == starts and meta.seq_lens_cpu.tolist() == lengths
        assert meta.max_seq_len == max(lengths) and meta.max_query_len == max(b - a for a, b in zip(starts, starts[1:]))
        width = meta.block_table.shape[1]
        assert width == -(-max(lengths) // size)
        padded = [[*table, *[0] * width][:width] for table in tables]
        assert meta.block_table.tolist() == padded
        index = batch.logits_index.tolist() if batch.logits_index is not None else list(range(len(ids)))
        assert index == logits_index and batch.sample_rows.tolist() == sample_rows
        assert (batch.offsets.tolist() if batch.offsets is not None else [0] * len(offsets)) == offsets
        self.num_compared += 1
        self.num_decode_batches += batch.counts is None


class MirrorSimulation(Simulation):
    """The random driver with the mirror as its worker."""

    def make_worker(self) -> FaultyWorker:
        return MirrorWorker(*self.sizes, self.seats, self.budget, self.max_model_len)


def mirror(seed: int, options: Options) -> MirrorWorker:
    """The mirror after one simulation in which every plan was compared."""
    simulation = MirrorSimulation(seed, options)
    simulation.run()
    assert isinstance(simulation.worker, MirrorWorker)
    return simulation.worker
