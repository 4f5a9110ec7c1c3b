"""One request as the engine core sees it: a token list and the number of them that are computed.

While a request runs, its counters live in the columns of rows.py and its newest tokens in the ring there; the fields
here are what it is between runs. Knows no blocks beyond their ids.
"""
from __future__ import annotations

import enum

from ipc.messages import AddRequest
from ipc.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    WAITING = 0                 # never scheduled
    RUNNING = 1                 # has a row
    PREEMPTED = 2               # gave its blocks back; waits to return
    FINISHED = 3                # its Finished is on the way; nothing of it is left


class Request:
    """State of one request. `row` is -1 unless it is RUNNING."""

    __slots__ = ("request_id", "params", "choice", "priority", "arrival", "tokens", "num_prompt_tokens",
                 "max_total_tokens", "min_total_tokens", "stop_token_ids", "status", "row", "blocks", "root", "hashes",
                 "num_published", "num_in_flight", "host_slots", "num_swapped_tokens", "num_cached_tokens",
                 "num_preemptions", "num_recomputed_tokens", "num_reused_tokens", "num_faults", "is_admitted",
                 "arrival_time", "salt", "is_shared", "is_replay", "num_prompt_logprobs", "arrival_step",
                 "num_overtaken", "num_queued_tokens", "spec_token_ids", "is_held", "__weakref__")

    def __init__(self, message: AddRequest, arrival: int, arrival_step: int = 0, index: int = 0) -> None:
        params: SamplingParams = message.sampling_params
        self.request_id = message.request_id + index        # choices have consecutive ids
        self.params = params
        self.choice = message.choice + index
        self.priority = message.priority
        self.arrival = arrival                              # order of arrival in this core; unique
        self.arrival_step = arrival_step                    # steps planned when it came
        self.arrival_time = message.arrival_time
        self.tokens = bytearray(message.prompt_token_ids)   # int32: prompt then output, what is known outside the row
        self.num_prompt_tokens = len(self.tokens) // 4
        self.tokens += message.output_token_ids
        self.max_total_tokens = 0                           # prompt + outputs at which it ends; set by Scheduler.add
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.row = -1
        self.blocks: list[int] = []                         # in logical order
        self.salt = message.cache_salt                      # requests of different salts share no blocks
        self.root = b""                                     # start of its hash chain
        self.is_shared = False                              # others of its salt have the same root
        self.is_replay = message.is_replay                  # a former core had accepted it
        self.hashes: list[bytes] = []                       # of its full blocks of known tokens
        self.num_published = 0                              # leading blocks that are in the cache map or from it
        self.num_in_flight = 0                              # plans sent and not committed that compute tokens of it
        self.host_slots: list[int] = []                     # its blocks in the host pool, in logical order
        self.num_swapped_tokens = 0                         # tokens whose KV is there
        self.num_cached_tokens = 0                          # prompt tokens the cache gave at first admission
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0                      # computed, lost, to be computed again
        self.num_reused_tokens = 0                          # taken from the cache when it returned
        self.num_faults = 0                                 # failed steps it was part of
        self.num_prompt_logprobs = 0                        # prompt positions whose log-probabilities were told
        self.num_overtaken = 0                              # later requests admitted before it (lpm)
        self.num_queued_tokens = 0                          # what it counts for in the waiting queue
        self.spec_token_ids: list[int] = []                 # drafts to verify in the very next step
        self.is_admitted = False                            # was scheduled at least once
        self.is_held = False                                # waits for its grammar; others are admitted before it

    @property
    def num_known_tokens(self) -> int:
        """Tokens in `tokens`; all that are known when the request has no row."""
        return len(self.tokens) // 4

    @property
    def is_finished(self) -> bool:
        return self.status == RequestStatus.FINISHED

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.status.name} row {self.row} blocks {len(self.blocks)}>"
