"""Enters the result of one step: the only writer of "computed".

The usual case (every row of the plan is where it was and computed one token) is a few column operations. Otherwise rows
of the plan are followed to where they are now; a row that ended meanwhile is a zombie whose token is dropped and
counted, and the newest token of a request that was preempted meanwhile is still accepted. Knows no messages.
"""
from __future__ import annotations

import numpy as np

from engine_core.request import Request
from engine_core.rows import PlanRecord
from engine_core.scheduler import NEVER_PUBLISH, Scheduler
from engine_core.speculation import accepted_by_row, enter_accepted, settle_drafted, take_proposals
from engine_core.stop import StopChecker
from ipc.messages import FINISH_ERROR, FINISH_STOP

NO_ROWS = np.empty(0, np.int32)


class Update:
    """What a step brought, for the frontends. Column i: request ids[i] got tokens[i] as its output number index[i]."""

    __slots__ = ("ids", "index", "tokens", "done")

    def __init__(self, ids: np.ndarray, index: np.ndarray, tokens: np.ndarray) -> None:
        self.ids, self.index, self.tokens = ids, index, tokens
        self.done: list[tuple[Request, int, int]] = []      # request, reason, stop token id or -1


def update(scheduler: Scheduler, stop: StopChecker, tokens: np.ndarray, bad_rows: np.ndarray = NO_ROWS,
           failed_rows: np.ndarray = NO_ROWS, ended_rows: np.ndarray = NO_ROWS, accepted: np.ndarray = NO_ROWS,
           proposals: np.ndarray = NO_ROWS) -> Update:
    """Commit the oldest plan in flight. `tokens` int32 by the plan's rows, -1: none; `bad_rows`: rows of the plan whose
    logits were not finite; `failed_rows`: rows that cannot go on; `ended_rows`: rows that their grammar ended;
    `accepted`, `proposals`: pairs (row, token), verified tokens after the first and drafts for the next step.

    Finished requests have left when this returns. Raises RuntimeError when the result does not fit its plan.
    """
    rows = scheduler.rows
    if scheduler._unsettled:
        scheduler.settle()
    record = rows.in_flight.pop(0)
    if tokens.size != record.num_rows or (tokens.size and int(tokens.max()) >= stop.vocab_size):
        raise RuntimeError(f"step {record.step}: result has {tokens.size} rows with ids up to "
                           f"{int(tokens.max()) if tokens.size else -1}; the plan has {record.num_rows} rows, the "
                           f"model {stop.vocab_size} ids")
    stats = scheduler.stats
    stats.num_steps += 1
    stats.num_computed_tokens += record.num_tokens
    if record.counts is None and not record.is_moved and not bad_rows.size and not failed_rows.size:
        if record.num_rows and int(tokens.min()) < 0:
            raise RuntimeError(f"step {record.step}: a row that computes its newest token returned none")
        result = _update_all(scheduler, stop, record.num_rows, tokens)
        if scheduler.config.num_speculative_tokens:
            take_proposals(scheduler, record, slice(0, record.num_rows), proposals)
    else:
        result = _update_some(scheduler, stop, record, tokens, bad_rows, failed_rows, accepted, proposals)
    if ended_rows.size:
        done = {request for request, _, _ in result.done}
        result.done += [(request, FINISH_STOP, -1) for row in ended_rows.tolist()
                        if (request := owner(scheduler, record, row)) is not None and request not in done]
    stats.num_sampled_tokens += result.tokens.size
    if record.suspect is not None:
        if record.num_tokens:                               # it was alone in this step, and the step succeeded
            record.suspect.num_faults = max(0, record.suspect.num_faults - 1)
            scheduler.suspects = [request for request in scheduler.suspects if request is not record.suspect]
    elif record.num_tokens and not scheduler.suspects:      # whose turn is still to come, may fail together again
        scheduler.num_batch_faults = 0
    for request, _, _ in result.done:
        scheduler.finish(request)
    stats.num_finished += len(result.done)
    return result


def _update_all(scheduler: Scheduler, stop: StopChecker, n: int, tokens: np.ndarray) -> Update:
    rows = scheduler.rows
    computed, known = rows.computed[:n], rows.known[:n]
    computed += 1
    rows.flat_ring[rows.ring_base[:n] + known % rows.ring_width] = tokens
    result = Update(rows.ids[:n].copy(), known - rows.prompt[:n], tokens)
    known += 1
    filled = (computed % rows.block_size == 0).nonzero()[0]
    if filled.size:
        scheduler.note_filled(filled)
    for row, reason, token in stop.check_rows(rows, slice(0, n), tokens):
        request = rows.request[row]
        if request is not None:
            result.done.append((request, reason, token))
    return result


def _update_some(scheduler: Scheduler, stop: StopChecker, record: PlanRecord, tokens: np.ndarray,
                 bad_rows: np.ndarray, failed_rows: np.ndarray, accepted: np.ndarray,
                 proposals: np.ndarray) -> Update:
    rows, n, stats = scheduler.rows, record.num_rows, scheduler.stats
    extra = accepted_by_row(record, accepted, stop.vocab_size)
    then = np.arange(n)
    if record.is_moved:
        then = (record.current >= 0).nonzero()[0]
        now = record.current[then].astype(np.int64)
    else:
        now = then
    before = rows.computed[now]
    rows.computed[now] += 1 if record.counts is None else record.counts[then]
    expected = np.ones(n, bool) if record.samples is None else record.samples
    bad = np.zeros(n, bool)
    bad[bad_rows] = True
    bad[failed_rows] = True
    if not np.array_equal(tokens >= 0, expected & ~bad):
        raise RuntimeError(f"step {record.step}: rows that returned a token differ from rows that sample")
    sampled = tokens[then] >= 0
    index, got = now[sampled], tokens[then[sampled]]
    known = rows.known[index]
    rows.flat_ring[rows.ring_base[index] + known % rows.ring_width] = got
    ids, output_index = rows.ids[index], known - rows.prompt[index]
    rows.known[index] = known + 1
    done = []
    for row, reason, token in stop.check_rows(rows, index, got):
        request = rows.request[row]
        if request is not None:
            done.append((request, reason, token))
    num_dropped = int((tokens >= 0).sum()) - got.size
    extra_ids: list[int] = []
    extra_index: list[int] = []
    extra_tokens: list[int] = []
    if record.drafted is not None:
        ended = {request.row for request, _, _ in done}
        for at in record.drafted[then].nonzero()[0].tolist():
            row, request = int(now[at]), rows.request[now[at]]
            if request is None:
                raise RuntimeError(f"row {row} of {rows.n} has no request")
            more = extra.get(int(then[at]), []) if row not in ended else []
            first = int(rows.known[row] - rows.prompt[row])
            count, reason, token = enter_accepted(scheduler, stop, row, more)
            extra_ids += [request.request_id] * count
            extra_index += range(first, first + count)
            extra_tokens += more[:count]
            if reason >= 0:
                done.append((request, reason, token))
            settle_drafted(scheduler, row, request)
            stats.num_draft_tokens += int(record.drafted[then[at]])
            stats.num_accepted_tokens += count
    is_filled = rows.computed[now] % rows.block_size == 0
    if record.drafted is not None:              # several tokens may pass the end of a block
        is_filled |= (record.drafted[then] > 0) & (rows.computed[now] // rows.block_size > before // rows.block_size)
    filled = now[is_filled]
    if filled.size:
        scheduler.note_filled(filled)
    for row, request in record.detached.items():
        request.num_in_flight -= 1
        if request.is_finished or tokens[row] < 0:
            continue
        num_dropped -= 1
        if record.drafted is not None:
            stats.num_draft_tokens += int(record.drafted[row])
        for i, token in enumerate([int(tokens[row]), *extra.get(row, [])]):
            stats.num_accepted_tokens += i > 0
            request.tokens += token.to_bytes(4, "little")
            extra_ids.append(request.request_id)
            extra_index.append(request.num_known_tokens - 1 - request.num_prompt_tokens)
            extra_tokens.append(token)
            end = stop.check_one(token, request.num_known_tokens, request.min_total_tokens, request.max_total_tokens,
                                 request.params.ignore_eos, request.stop_token_ids)
            if end is not None:
                done.append((request, *end))
                break
        scheduler.waiting.recount(request)
        if scheduler.blocks.enable_prefix_caching:
            scheduler.hasher.extend(request.hashes, request.root, request.tokens)
    stats.num_wasted_tokens += num_dropped
    if extra_ids:
        ids = np.concatenate([ids, np.array(extra_ids, np.int64)])
        output_index = np.concatenate([output_index, np.array(extra_index, np.int64)])
        got = np.concatenate([got, np.array(extra_tokens, np.int32)])
    result = Update(ids, output_index, got)
    if scheduler.config.num_speculative_tokens:     # before anyone leaves, which moves rows
        take_proposals(scheduler, record, index, proposals)
    failed = [request for row in failed_rows.tolist() if (request := owner(scheduler, record, row)) is not None]
    result.done = done + [(request, FINISH_ERROR, -1) for request in failed] + _end_bad(scheduler, record, bad_rows)
    return result


def owner(scheduler: Scheduler, record: PlanRecord, row: int) -> Request | None:
    """The live request that a row of this plan belongs to, wherever it is now; None: it has ended."""
    now = int(record.current[row]) if record.is_moved else row
    request = scheduler.rows.request[now] if now >= 0 else record.detached.get(row)
    return request if request is not None and not request.is_finished else None


def _end_bad(scheduler: Scheduler, record: PlanRecord, bad_rows: np.ndarray) -> list[tuple[Request, int, int]]:
    """Requests with logits that are not finite end; nothing they computed may be found by others, and those who adopted
    a block of theirs compute it again."""
    blocks = scheduler.blocks
    ended = [request for row in bad_rows.tolist() if (request := owner(scheduler, record, row)) is not None]
    tainted: set[int] = set()
    keys: set[bytes] = set()
    for request in ended:
        # Blocks it adopted are other requests' and sound. One that was preempted may have computed those itself since.
        first = 0 if request.num_preemptions else request.num_cached_tokens // blocks.block_size
        tainted.update(request.blocks[first:])
        keys.update(request.hashes[first:])
        request.num_published = NEVER_PUBLISH
    tainted.update(block for h in keys if (block := blocks.cached.get(h)) is not None)
    victims = _holders(scheduler, ended, tainted)
    for block in tainted:
        blocks.unpublish(block)
    for request in victims:
        scheduler.recompute(request)
    for request in scheduler.waiting:
        if request.host_slots and not keys.isdisjoint(request.hashes):
            scheduler.drop_swap(request)
    return [(request, FINISH_ERROR, -1) for request in ended]


def _holders(scheduler: Scheduler, ended: list[Request], tainted: set[int]) -> list[Request]:
    """Running requests that hold a tainted block. What they computed after it is tainted too, and added."""
    rows = scheduler.rows
    others = [r for r in rows.request[:rows.n] if r is not None and r not in ended]
    victims: list[Request] = []
    found = True
    while found:
        found = False
        for request in others:
            first = next((i for i, block in enumerate(request.blocks) if block in tainted), None)
            if first is not None and request not in victims:
                tainted.update(request.blocks[first:])
                victims.append(request)
                found = True
    return victims
