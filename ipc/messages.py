"""Every struct that crosses a process boundary, grouped by direction, and the table of their kinds.

Knows no bytes (codec.py) and no sockets. Two layouts: request-level messages are maps, so that a decoding error names
the field; per-step messages are arrays of packed columns (little-endian int32 unless a comment says otherwise), so that
a step of 256 decodes costs microseconds. Columns decode as memoryviews into the received frame. Times are nanoseconds
of CLOCK_MONOTONIC, which all processes of a host share.

    supervisor ─ Config, Shutdown ─▶ child                child ─ Hello, Phase, Ready, Failure ─▶ supervisor (lifeline)
    frontend ─ Hello, AddRequest, Abort, Command ─▶ core  core ─ Phase, EngineReady, Outputs, CommandReply ─▶ frontend
    core ─ Hello, SchedulerOutput, Profile, PrepareGrammar, Sleep, WakeUp ─▶ worker
    worker ─ Phase, WorkerReady, ModelRunnerOutput, StepFailed, Profiled, GrammarPrepared, Slept ─▶ core
"""
from __future__ import annotations

import msgspec

from ipc.config import CoreProcess, EngineConfig, FrontendProcess, Peer, WorkerProcess
from ipc.sampling_params import SamplingParams

EMPTY = memoryview(b"")


# ---------------------------------------------------------------- lifeline: supervisor and child

class ConfigWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> worker, answer to its Hello: its section of the options."""
    config: WorkerProcess


class ConfigCore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> engine core, answer to its Hello."""
    config: CoreProcess


class ConfigFrontend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> HTTP frontend, answer to its Hello."""
    config: FrontendProcess


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A starting process -> its peers: what it is doing. Sent when a phase begins, as it advances, and when it ends."""
    role: str                                   # "worker", "engine_core", "frontend", "launch"
    name: str                                   # "load weights", ...
    fraction: float                             # 0 to 1; 1: ended
    seconds: float = 0.0                        # since the phase began
    detail: str = ""                            # one line for the screen


SERVING = "serving"                             # phase of a core that has its worker back


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Child -> supervisor, once: it serves. The text is printed."""
    detail: str
    num_blocks: int = 0                         # of a worker's pool: a successor must have as many


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dying process -> supervisor: why. One line, printed without a traceback unless it is a fault of ours."""
    reason: str
    traceback: str = ""


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> child: stop. A frontend finishes its streams for drain_s seconds first."""
    reason: str
    drain_s: float = 0.0


class PeerDown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> child: another process has ended. A PeerUp follows, unless everything ends."""
    role: str
    rank: int                                   # of a frontend: its number
    reason: str


class PeerUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> child: a new process plays this role; connect to it."""
    role: str
    rank: int
    peer: Peer


class EngineUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Supervisor -> AsyncLLM's process, once the engine serves: where its core listens."""
    core_address: str
    core_epoch: int
    run_dir: str
    pids: list[int]                             # supervisor first, then its children


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AsyncLLM's process -> its supervisor, first of all: start this engine. Answered by Phases, then EngineUp or
    Failure."""
    config: EngineConfig


# ---------------------------------------------------------------- frontend -> engine core

class AddRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frontend -> engine core, once per request. Each choice is answered by Outputs, the last of which has its
    Finished.

    request_id is frontend number << 40 | counter, of the first choice. A choice's number keys its noise together with
    the seed.
    """
    request_id: int
    prompt_token_ids: memoryview                # int32, at least one
    sampling_params: SamplingParams             # seed is always set
    output_token_ids: memoryview = EMPTY        # int32; not empty only when a live request is re-added after a restart
    choice: int = 0                             # number of the first choice
    num_choices: int = 1                        # they have consecutive request ids; all are accepted or none
    priority: int = 0                           # lower runs first under the priority policy
    arrival_time: float = 0.0                   # seconds of time.monotonic()
    is_replay: bool = False                     # re-added after a restart of the core: it was accepted before
    cache_salt: str = ""                        # requests of different salts never share cached blocks


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frontend -> engine core: these requests are no longer wanted. Unknown ids are ignored; each known one is answered
    by a Finished with reason abort."""
    request_ids: list[int]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frontend -> engine core: a control call. Answered by the CommandReply of the same call_id."""
    call_id: int
    name: str                                   # known to EngineCore, WorkerRelay or Nap
    request_id: int = 0                         # of "request_status"
    level: int = 0                              # of "sleep": 1 or 2
    grammar: memoryview = EMPTY                 # of "prepare_grammar": StructuredOutputs as msgpack


# ---------------------------------------------------------------- engine core -> frontend

class EngineReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> frontend, answer to its Hello, sent when the workers are ready."""
    num_blocks: int                             # usable blocks
    block_size: int
    max_model_len: int
    vocab_size: int                             # width of the logits: the bound for token ids
    eos_token_ids: list[int]
    max_num_seqs: int
    dtype: str
    detail: str                                 # the worker's description of model and pool


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of one request, inside Outputs."""
    request_id: int
    reason: int                                 # FINISH_* below
    stop_token_id: int = -1                     # the token that stopped it, -1: none
    error_code: int = 0                         # ipc.errors code, with reason FINISH_ERROR
    message: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0


FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR = 0, 1, 2, 3
FINISH_NAMES = ("stop", "length", "abort", "error")


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request was scheduled for the first time, inside Outputs."""
    request_id: int
    num_cached_tokens: int
    max_tokens: int                             # after clamping to the pool and to max_model_len
    scheduled_ns: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position of a request, inside Outputs. Fields as in RowLogprobs."""
    request_id: int
    position: int
    rank: int
    token_ids: memoryview
    values: memoryview


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The vector of a pooling request, inside Outputs; its Finished follows in the same message."""
    request_id: int
    vector: memoryview                          # float32 [E]


class Outputs(msgspec.Struct, array_like=True, gc=False):
    """Engine core -> frontend after each step with news for it, and once a second when idle: the heartbeat.

    Row i: request request_ids[i] received tokens[i], its output number output_index[i].
    """
    step: int                                   # last committed step: progress
    request_ids: memoryview = EMPTY             # int64
    output_index: memoryview = EMPTY
    tokens: memoryview = EMPTY
    admitted: list[Admitted] = []
    finished: list[Finished] = []
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    stamps: memoryview = EMPTY                  # int64 [steps, STAMPS]: some times a second, those not told of yet
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    pooled: list[Pooled] = []


# One step in Outputs.stamps: monotonic ns of the core and the worker, then what it was. With the frontend's own times
# they give the whole timeline. plan_end: scheduled, not yet encoded. num_prefill_tokens: of num_tokens, those of rows
# in mid-prompt.
STAMPS = ("plan_begin", "plan_end", "plan_sent", "worker_received", "worker_prepared", "worker_launched", "worker_done",
          "device_ns", "commit_begin", "commit_end", "outputs_sent", "step", "num_rows", "num_tokens",
          "num_prefill_tokens")


class CommandReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> frontend: the answer to a Command. `result` is msgpack."""
    call_id: int
    result: msgspec.Raw
    error: str = ""


# ---------------------------------------------------------------- engine core -> worker

class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that enters the batch as the next row: everything the worker needs, once. Its tokens and blocks are the
    next ones in SchedulerOutput.new_tokens and new_blocks."""
    request_id: int
    num_tokens: int                             # prompt and outputs so far
    num_prompt_tokens: int
    num_computed_tokens: int                    # KV already in its blocks when this plan's ops are done
    num_blocks: int
    sampling_params: SamplingParams
    choice: int = 0
    is_reusable: bool = True                    # requests of its salt may find what it computes


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """Engine core -> worker: one step, as differences to the last plan. Executed in this order:

    moves · gather swap_out and copy sources · write copy and swap_in targets · new · extend · advance · run.
    Row numbers mean something only inside their plan. Every row computes one token unless `counts` names it.
    """
    step: int
    num_rows: int                               # after moves and new
    moves: memoryview = EMPTY                   # pairs (row, last): row leaves, row `last` takes its place
    new: list[NewRow] = []
    new_tokens: memoryview = EMPTY
    new_blocks: memoryview = EMPTY
    extend: memoryview = EMPTY                  # pairs (row, block) appended to block tables, in order
    advance: memoryview = EMPTY                 # pairs (row, n): n more tokens are in blocks adopted from the cache
    counts: memoryview = EMPTY                  # pairs (row, n): n is not 1, or nothing is sampled; 0: computes nothing
    swap_out: memoryview = EMPTY                # pairs (block, host slot)
    copies: memoryview = EMPTY                  # pairs (source block, target block)
    swap_in: memoryview = EMPTY                 # pairs (host slot, block)
    reset: bool = False                         # drop all rows first; ends the stop after a failed step
    stale: bool = False                         # the prefix cache was reset: rows of before `new` are not reusable
    spec_token_ids: memoryview = EMPTY          # pairs (row, token): drafts to verify after the row's newest token


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> worker: start or stop recording operators. Answered by the Profiled of the same call_id."""
    call_id: int
    is_start: bool


class PrepareGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> worker: compile this beside the steps and keep it, a request with it comes or waits. Answered by
    the GrammarPrepared of the same call_id."""
    call_id: int
    grammar: memoryview                         # StructuredOutputs as msgpack


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> worker, when nothing is in flight: give up the pool, and at level 2 the weights too. Answered by
    Slept. All rows are dropped."""
    level: int                                  # 1: weights stay, of a GPU in host memory


class WakeUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine core -> worker that sleeps: be as after the start, with as many blocks. Answered by WorkerReady."""


# ---------------------------------------------------------------- worker -> engine core

class Slept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker -> engine core: the memory is given back."""


class KeptRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of a former core, inside WorkerReady. Its tokens and blocks are the next in kept_tokens and kept_blocks."""
    request_id: int
    num_tokens: int                             # with keys and values in its blocks


class WorkerReady(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker -> engine core, answer to its Hello once weights and pool are there.

    A worker that outlived its core says what its pool still holds, so that the new core has it not computed again.
    """
    num_blocks: int                             # usable blocks; ids are 1 to num_blocks, block 0 is the null block
    num_host_blocks: int                        # slots of the swap pool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    detail: str                                 # one line: model, dtype, pool
    swap_block_ns: int = 0                      # measured time to copy one block out and back; 0: not measured
    kept: list[KeptRow] = []
    kept_tokens: memoryview = EMPTY
    kept_blocks: memoryview = EMPTY


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one sampled or prompt position, inside ModelRunnerOutput. `row` is the plan's."""
    row: int
    position: int                               # of a sampled token: its output number; of a prompt token: its position
    rank: int                                   # of the token itself among all, 1: the largest
    token_ids: memoryview                       # the token itself first, then the top ones in falling order
    values: memoryview                          # float32, of token_ids


class RowPooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The vector of a pooling request whose prompt is computed, inside ModelRunnerOutput."""
    row: int
    vector: memoryview                          # float32 [E]


class RowFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of the step cannot go on (a grammar that does not compile, say); the others are not affected."""
    row: int
    error_code: int                             # ipc.errors code
    message: str


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """Worker -> engine core: the sampled tokens of one step, by the plan's rows."""
    step: int
    tokens: memoryview                          # one per row; -1: none sampled
    bad_rows: memoryview = EMPTY                # rows whose logits were not finite: their requests end with an error
    received_ns: int = 0
    prepared_ns: int = 0
    launched_ns: int = 0
    done_ns: int = 0
    device_ns: int = 0                          # time of the forward pass on the device
    logprobs: list[RowLogprobs] = []            # of sampled tokens whose requests ask for them
    prompt_logprobs: list[RowLogprobs] = []     # of prompt tokens computed in this step, each position once
    pooled: list[RowPooled] = []
    ended_rows: memoryview = EMPTY              # rows that their grammar ended with this token
    failed: list[RowFailure] = []
    accepted: memoryview = EMPTY                # pairs (row, token): verified tokens after the one in `tokens`
    spec_token_ids: memoryview = EMPTY          # pairs (row, token): drafts for the row's next step


class StepFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker -> engine core: this step raised. The worker executes nothing more until a plan with `reset`."""
    step: int
    reason: str
    traceback: str = ""
    request_ids: list[int] = []                 # the requests it is about, when the worker can tell


class Profiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker -> engine core: the profiler records, or has stopped and its trace is in a file."""
    call_id: int
    path: str = ""                              # of a stop: Chrome trace events as JSON, in the run directory
    seconds: float = 0.0                        # it recorded
    error: str = ""


class GrammarPrepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Worker -> engine core: the grammar is compiled, or cannot be."""
    call_id: int
    problem: str = ""                           # why it cannot


class HelloAck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either side of a link -> the other: the Hello was refused. Schema hashes as hex."""
    refused: str


# kind -> struct. HELLO has no body: its header alone must be readable by every version.
HELLO = 1
KINDS: dict[int, type] = {
    2: HelloAck,
    10: ConfigWorker, 11: ConfigCore, 12: ConfigFrontend, 13: Phase, 14: Ready, 15: Failure, 16: Shutdown, 17: EngineUp,
    18: Start, 19: PeerDown, 25: PeerUp,
    20: AddRequest, 21: Abort, 22: Command,
    30: EngineReady, 31: Outputs, 32: CommandReply,
    40: SchedulerOutput, 41: Profile, 42: Sleep, 43: WakeUp, 44: PrepareGrammar,
    50: WorkerReady, 51: ModelRunnerOutput, 52: StepFailed, 53: Profiled, 54: Slept, 55: GrammarPrepared,
}
KIND_OF: dict[type, int] = {struct: kind for kind, struct in KINDS.items()}

# Fields that may be long (a whole prompt): above codec.INLINE_LIMIT they travel as frames of their own.
LONG_FIELDS: dict[type, tuple[str, ...]] = {
    AddRequest: ("prompt_token_ids", "output_token_ids"),
    SchedulerOutput: ("new_tokens",),
    WorkerReady: ("kept_tokens", "kept_blocks"),
}

ROLES = ("supervisor", "frontend", "engine_core", "worker")
