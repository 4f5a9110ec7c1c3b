"""What a worker that outlived its core still holds: rows of the former core's last executed plan, by request id.

The new core treats their blocks as free ones that are handed out last, and holds nothing back: a block that is handed
out meanwhile is lost. When a frontend adds a request again, its token list is compared with what the worker computed,
and the blocks of the common part are published under the request's own hash chain, from where admission takes them as
it takes any cached block. So the key's rules (salt, epoch) hold here too, and a request that nobody adds again leaves
nothing behind. Knows no messages of frontends.

Cached blocks of requests that had ended are not kept. Whether a request may find a block depends on salt and cache
epoch, which the worker does not know and no frontend keeps of an ended request; the core would have to write the key of
each block it fills to memory that outlives it, and to say there which of them no plan has computed yet: a second owner
of what is cached, on the way of every step and right at whichever instruction the core is killed. What that would save
is one prefill of each prefix after a crash.
"""
from __future__ import annotations

import numpy as np

from engine_core.block_manager import BlockManager
from engine_core.request import Request
from ipc.messages import WorkerReady


class KeptRows:
    """`rows`: request id -> (its blocks in logical order, the int32 tokens whose keys and values they hold)."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[list[int], bytes]] = {}

    def take(self, ready: WorkerReady, blocks: BlockManager) -> None:
        """Call once, before anything is allocated. Raises RuntimeError when the columns do not fit the rows."""
        if not blocks.enable_prefix_caching:
            return
        tokens, table = bytes(ready.kept_tokens), np.frombuffer(ready.kept_blocks, np.int32).tolist()
        token_at = block_at = 0
        for row in ready.kept:
            num_blocks = blocks.blocks_for(row.num_tokens)
            held = table[block_at:block_at + num_blocks]
            self.rows[row.request_id] = held, tokens[token_at * 4:(token_at + row.num_tokens) * 4]
            token_at, block_at = token_at + row.num_tokens, block_at + num_blocks
            for block in reversed(held):        # as when blocks are freed: the tail is handed out before the prefix
                blocks.free_queue.move_to_end(block)
            blocks.unclaimed.update(held)
        if (token_at * 4, block_at) != (len(tokens), len(table)):
            raise RuntimeError(f"the worker's rows have {token_at} tokens in {block_at} blocks; it sent "
                               f"{len(tokens) // 4} and {len(table)}")

    def claim(self, request: Request, blocks: BlockManager) -> None:
        """The request is back and waits. Let it find what was computed of the tokens it has now."""
        held, tokens = self.rows.pop(request.request_id, ([], b""))
        if not held:
            return
        count = _common_tokens(tokens, request.tokens)
        size = blocks.block_size
        for i, block in enumerate(held[:blocks.blocks_for(count)]):
            if block not in blocks.unclaimed:
                continue                        # handed out since, or claimed by another request with this prefix
            blocks.unclaimed.discard(block)
            parent = request.hashes[i - 1] if i else request.root
            content = tokens[i * size * 4:min((i + 1) * size, count) * 4]
            if len(content) == size * 4:
                blocks.publish(block, request.hashes[i], parent, content)
            elif blocks.partial is not None:
                blocks.partial.add(block, parent, content)


def _common_tokens(computed: bytes, known: bytearray) -> int:
    """Leading tokens that both have."""
    size = min(len(computed), len(known)) // 4
    differs = np.frombuffer(computed, np.int32, size) != np.frombuffer(bytes(known), np.int32, size)
    return int(differs.argmax()) if differs.any() else size
