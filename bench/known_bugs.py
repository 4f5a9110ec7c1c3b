"""Bugs that engines of this kind have had, as one change of our code each. The tests must catch every one.

`old` occurs exactly once in the file. Adding a bug: one entry, then `python launch.py bench mutate --known`.
"""

from __future__ import annotations

from typing import NamedTuple


class KnownBug(NamedTuple):
    name: str
    path: str
    old: str
    new: str


_S, _A, _B, _R, _U, _V = (
    f"engine_core/{name}.py" for name in ("scheduler", "admission", "block_manager", "rows", "update", "recovery")
)

KNOWN_BUGS = [
    KnownBug(
        "a cached block holds the last prompt token, so nothing is left to compute",
        _A,
        "min((known - 1) // size, len(request.hashes))",
        "min(known // size, len(request.hashes))",
    ),
    KnownBug(
        "adopting a cached block that is free is not counted as taking a free block",
        _B,
        "if count > len(free_queue) - reclaimed:",
        "if count > len(free_queue):",
    ),
    KnownBug(
        "a freed request's blocks are queued head first", _B, "for block in reversed(blocks):", "for block in blocks:"
    ),
    KnownBug(
        "an adopted block is not taken out of the free queue",
        _B,
        "            if ref_count[block] == 0:\n                del free_queue[block]\n",
        "",
    ),
    KnownBug(
        "a block handed out again stays findable under its old hash",
        _B,
        "        self.unpublish(block)\n        if self.unclaimed:\n            self.unclaimed.discard(block)\n"
        "        self.ref_count[block] = 1",
        "        if self.unclaimed:\n            self.unclaimed.discard(block)\n        self.ref_count[block] = 1",
    ),
    KnownBug(
        "a finished request keeps its blocks",
        _S,
        "                self.on_finish(request)\n            self.blocks.free(request.blocks)",
        "                self.on_finish(request)",
    ),
    KnownBug(
        "a preempted request frees its blocks twice",
        _S,
        "        self._leave(request)\n        self.blocks.free(request.blocks)\n        request.blocks = []\n",
        "        self._leave(request)\n        self.blocks.free(request.blocks)\n",
    ),
    KnownBug(
        "what a failed step published stays published",
        _V,
        "            if blocks.block_hash[block] == h:\n                blocks.unpublish(block)\n",
        "",
    ),
    KnownBug(
        "who adopted a block of a failed step keeps it",
        _V,
        "            if block in bad:\n                computed = i * size\n                break\n",
        "",
    ),
    KnownBug(
        "a swap that a failed step lost is believed",
        _V,
        "computed = min(int(rows.computed[row]), kept.get(request, 1 << 60))",
        "computed = int(rows.computed[row])",
    ),
    KnownBug("planned tokens are not taken back after a failed step", _V, "    rows.reset_to_committed()", "    pass"),
    KnownBug(
        "the last row is not moved into the place of one that left",
        _R,
        "            for column in self._columns:\n                column[row] = column[last]\n",
        "",
    ),
    KnownBug("a move does not take the newest tokens along", _R, "            self.ring[row] = self.ring[last]\n", ""),
    KnownBug(
        "plans in flight do not follow a move",
        _R,
        "        for record in self.in_flight:\n            self._follow_move(record, row, last, request)\n",
        "",
    ),
    KnownBug(
        "a zombie's token is given to the request that took its row",
        _R,
        "        if then >= 0:\n            current[then] = -1\n",
        "        if then >= 0:\n",
    ),
    KnownBug(
        "the newest token of a preempted request is dropped",
        _R,
        "                record.detached[then] = leaving\n                leaving.num_in_flight += 1\n",
        "                pass\n",
    ),
    KnownBug(
        "a preempted request returns in the same step, before its newest token is known",
        _A,
        "        if request is None or request.num_in_flight:        # its newest token is still being computed\n"
        "            break\n"
        "        if request in step.preempted:                       # this plan copies its blocks out; it cannot copy "
        "them back\n            break\n",
        "        if request is None:\n            break\n",
    ),
    KnownBug(
        "computed counts one token too few after a step of many",
        _U,
        "rows.computed[now] += 1 if record.counts is None else record.counts[then]",
        "rows.computed[now] += 1",
    ),
    KnownBug(
        "the slot of a decode is off by one at a block boundary",
        "worker/batch.py",
        "np.remainder(computed, size, out=scratch)",
        "np.remainder(computed + 1, size, out=scratch)",
    ),
    KnownBug("a chunk's slots ignore where it starts", "worker/batch.py", "        positions += computed[index]\n", ""),
    KnownBug(
        "logits are taken from a chunk in mid-prompt",
        "worker/batch.py",
        "samples = lengths >= state.known[active]",
        "samples = lengths >= 0",
    ),
    KnownBug(
        "a recycled row keeps the old block table",
        "worker/request_state.py",
        "            self.block_table[row, :blocks] = self.block_table[last, :blocks]\n",
        "",
    ),
    KnownBug(
        "a row's parameters stay behind when it moves",
        "worker/request_state.py",
        "            for column in self._columns:\n                column[row] = column[last]\n",
        "",
    ),
    KnownBug(
        "a victim is one that the step already serves",
        _S,
        "                victim = order[end]",
        "                victim = order[0]",
    ),
    KnownBug(
        "the newest token counts as computed",
        _R,
        "        self.known[row] = self.length[row] = length\n",
        "        self.known[row] = self.length[row] = length - 1\n",
    ),
    KnownBug(
        "max_tokens is not clamped to what fits the pool",
        _S,
        "request.max_total_tokens = limit if wanted is None else min(prompt + wanted, limit)",
        "request.max_total_tokens = limit if wanted is None else prompt + wanted",
    ),
    KnownBug(
        "a partial match copies a block that this very step computes", _A, "{b for b, _ in step.published})", "set())"
    ),
    KnownBug(
        "after a reset of the prefix cache, what running requests compute from old blocks is found again",
        _S,
        "is_old = request.row >= 0 or request.num_swapped_tokens > 0",
        "is_old = False",
    ),
    KnownBug(
        "host slots are reused within the plan that reads them",
        _B,
        "        self._returned += slots",
        "        self._free += slots",
    ),
    KnownBug(
        "an aborted swapped-out request keeps its host slots",
        _S,
        "            self.waiting.discard(request)\n        self.drop_swap(request)",
        "            self.waiting.discard(request)",
    ),
    KnownBug(
        "blocks of a cached prefix that others hold are counted twice instead of not at all",
        _A,
        "return needed - sum(1 for block in hits",
        "return needed + sum(1 for block in hits",
    ),
    KnownBug(
        "rows that compute nothing cost budget",
        _S,
        "budget -= n - len(prefilling) - len(idle)",
        "budget -= n - len(prefilling) + len(idle)",
    ),
    KnownBug(
        "a preempted request that needs its whole prompt finds its own blocks",
        _S,
        "        if request.params.needs_whole_prompt:\n            self._set_root(request, self.cache_epoch)\n",
        "",
    ),
    KnownBug(
        "what a request with bad values computed is published when it leaves",
        "engine_core/update.py",
        "        request.num_published = NEVER_PUBLISH\n",
        "",
    ),
    KnownBug(
        "bad blocks come back from host memory",
        "engine_core/update.py",
        "            scheduler.drop_swap(request)\n",
        "            pass\n",
    ),
    KnownBug(
        "rows that their grammar ended go on",
        "engine_core/update.py",
        "    if ended_rows.size:\n",
        "    if not ended_rows.size:\n",
    ),
    KnownBug(
        "a row with options is never forgotten",
        "worker/request_state.py",
        "            self.num_with_options -= 1",
        "            self.num_with_options += 1",
    ),
    KnownBug(
        "a rejected draft's blocks are kept by the core and given back by the worker",
        "engine_core/speculation.py",
        "    keep = blocks.blocks_for(known)",
        "    keep = len(request.blocks)",
    ),
    KnownBug(
        "a row with drafts in flight is planned again before its result",
        "engine_core/speculation.py",
        "return rows.holds[:n] & (rows.length[:n] > rows.known[:n])",
        "return rows.holds[:n] & False",
    ),
    KnownBug(
        "a victim's drafts in flight count as computed when it is swapped out",
        "engine_core/preemption.py",
        "rows.planned[request.row] - rows.drafted[request.row])",
        "rows.planned[request.row])",
    ),
    KnownBug(
        "a draft stands although the one before it was wrong",
        "worker/spec_decode/verify.py",
        "stands[begin + int(wrong[0]) + 1:end] = False",
        "stands[begin + int(wrong[-1]) + 1:end] = False",
    ),
]
