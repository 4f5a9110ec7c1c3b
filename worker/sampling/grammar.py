"""Grammars beside the sampler: compiled once, followed token by token, turned into masks while the forward pass runs.

    compile  before a request comes (grammar_calls.py): the first mask too, which builds most of the automaton
    begin    before the forward pass: fill the masks of rows that will sample, in threads
    mask     before the draw: wait for the masks, through which the sampler reads the logits
    accept   after the draw: every row's grammar takes its token; rows that may not go on are named

A row's state follows from its outputs, so a row that returns after a preemption or a restart takes them all again. The
state allows rollback, so drafts can be checked against it. A grammar that fails ends its own request only. Knows no
blocks and no model.
"""
from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask_par

from ipc.errors import FAULT, INVALID
from ipc.priority import give_way_in_thread, pausing
from ipc.structured_outputs import (COMPILED_BYTES, PARSER_LIMITS, StructuredOutputs, compiled_bytes, grammar_text,
                                    one_line)
from worker.request_state import RequestState

logger = logging.getLogger(__name__)

MAX_FILL_THREADS = 16
LIMITS = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)

Compiled = Future[LLMatcher]


def num_fill_threads() -> int:
    """As many as there are cores: a row takes about 100 us."""
    return min(MAX_FILL_THREADS, len(os.sched_getaffinity(0)))


class GrammarError(ValueError):
    """A grammar that does not compile."""


class RowGrammar:
    """Where one row is in its grammar. `matcher` is None until its compilation is done."""

    __slots__ = ("compiled", "matcher", "is_done")

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.matcher: LLMatcher | None = None
        self.is_done = False                    # it has ended; tokens of steps in flight do not count

    def start(self, outputs: list[int]) -> None:
        """Take what the row has put out so far. Raises GrammarError, RuntimeError."""
        matcher = self.compiled.result().deep_copy()
        if outputs and not matcher.consume_tokens(outputs):
            raise RuntimeError(f"the outputs so far do not fit the grammar: {one_line(matcher.get_error())}")
        self.matcher = matcher


class Grammars:
    """Those of one worker. `load` gives the vocabulary, in a thread, when the first grammar comes."""

    def __init__(self, load: Callable[[], LLTokenizer], *, cache_bytes: int = COMPILED_BYTES) -> None:
        self._load, self._cache_bytes = load, cache_bytes
        self._tokenizer: LLTokenizer | None = None
        self._compiler: ThreadPoolExecutor | None = None
        self._filler: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._cache: collections.OrderedDict[bytes, tuple[Compiled, int]] = collections.OrderedDict()
        self._cached_bytes = 0
        self._bits = np.empty((0, 0), np.int32)         # a step's, used again by the next

    # ------------------------------------------------------------ compiling

    def compile(self, key: bytes, spec: StructuredOutputs) -> Compiled:
        """The compiled grammar, perhaps still being made. `key` is the spec as bytes."""
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            return found[0]
        if self._compiler is None:              # one thread: the vocabulary is loaded once
            self._compiler = ThreadPoolExecutor(1, "compile-grammars", initializer=give_way_in_thread)
        compiled = self._compiler.submit(self._compile, spec)
        size = compiled_bytes(key)
        self._cache[key] = compiled, size
        self._cached_bytes += size
        old = []
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, (pushed_out, freed) = self._cache.popitem(last=False)
            self._cached_bytes -= freed
            old.append(pushed_out)
            del pushed_out
        if old:                                 # to free one takes milliseconds, which a step would wait for
            self._compiler.submit(old.clear)
        return compiled

    @pausing()
    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            text = grammar_text(spec, any_to_lark)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)) from error
        except Exception as error:              # the converter raises plain Exception for a syntax error
            raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}") from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()           # copies share what it builds
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return matcher

    # ------------------------------------------------------------ a step

    def begin(self, state: RequestState, rows: np.ndarray) -> GrammarStep | None:
        """Before the forward pass that samples these rows. None: no row of the step has a grammar."""
        found: list[tuple[int, RowGrammar]] = []
        is_sampled = np.zeros(state.n, bool)
        is_sampled[rows] = True
        for row in range(state.n):
            options = state.options[row]
            if options is None or options.structured_outputs is None:
                continue
            if options.grammar is None:
                options.grammar = RowGrammar(self.compile(options.grammar_key, options.structured_outputs))
            if is_sampled[row]:
                found.append((row, options.grammar))
        if not found:
            return None
        if self._filler is None:
            self._filler = ThreadPoolExecutor(1, "fill-masks")
            self._executor = LLExecutor(num_fill_threads())
        return GrammarStep(state, found, self._filler.submit(self._fill, state, found))

    def _fill(self, state: RequestState, found: list[tuple[int, RowGrammar]]) -> tuple[np.ndarray, dict[int, str]]:
        """Bits int32 [len(found), words] and the failures, by row. Nothing changes the rows meanwhile."""
        failures: dict[int, str] = {}
        todo: list[tuple[LLMatcher, int]] = []
        for index, (row, grammar) in enumerate(found):
            try:
                if grammar.matcher is None:
                    grammar.start(state.tokens[row, state.num_prompt[row]:state.known[row]].tolist())
            except (ValueError, RuntimeError) as error:
                self._fail(state, row, error)
                continue
            if grammar.matcher is not None and not grammar.is_done and not grammar.matcher.is_error():
                todo.append((grammar.matcher, index))
        words = -(-self._tokenizer.vocab_size // 32) if self._tokenizer is not None else 1
        if self._bits.shape[0] < len(found) or self._bits.shape[1] != words:
            self._bits = np.empty((len(found), words), np.int32)
        bits = self._bits[:len(found)]
        if len(todo) < len(found):
            bits[:] = -1
        if todo and self._executor is not None:
            fill_next_token_bitmask_par(self._executor, todo, bits)
        for index, (row, grammar) in enumerate(found):
            if grammar.matcher is not None and grammar.matcher.is_error() and not grammar.is_done:
                bits[index] = -1
                failures[row] = one_line(grammar.matcher.get_error())
        return bits, failures

    @staticmethod
    def _fail(state: RequestState, row: int, error: Exception) -> None:
        options = state.options[row]
        if options is not None and options.failure is None:
            if isinstance(error, RuntimeError):
                options.failure = FAULT, str(error)
            else:
                options.failure = INVALID, f"structured_outputs: {str(error)[:500]}"


class GrammarStep:
    """The grammars of one step."""

    def __init__(self, state: RequestState, found: list[tuple[int, RowGrammar]],
                 filled: Future[tuple[np.ndarray, dict[int, str]]]) -> None:
        self._state, self._found, self._filled = state, found, filled

    def mask(self, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """(words, word_index) of SamplingColumns for these rows, whose logits are `width` wide. The words hold until
        the next step begins."""
        bits, failures = self._filled.result()
        for row, text in failures.items():
            options = self._state.options[row]
            if options is not None and options.failure is None:
                options.failure = INVALID, f"structured_outputs: the grammar became too complex: {text}"
        entry_of = {row: entry for entry, row in enumerate(rows.tolist())}
        index = np.full(len(rows), -1, np.int32)
        for at, (row, grammar) in enumerate(self._found):
            if row in entry_of and not grammar.is_done:
                index[entry_of[row]] = at
        missing = -(-width // 32) - bits.shape[1]
        return (np.pad(bits, ((0, 0), (0, missing))) if missing > 0 else bits), index      # ids beyond the tokenizer

    def accept(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take the drawn tokens, -1: none. Returns the rows that their grammar ended, int32."""
        token_of = dict(zip(rows.tolist(), tokens.tolist()))
        ended = []
        for row, grammar in self._found:
            token = token_of.get(row, -1)
            if token < 0 or grammar.is_done or grammar.matcher is None:
                continue
            if not grammar.matcher.consume_token(token):        # the row's next mask fails, and ends it with an error
                logger.warning("a grammar refused a token that its mask allowed: %s",
                               one_line(grammar.matcher.get_error()))
            elif grammar.matcher.is_stopped():
                grammar.is_done = True
                ended.append(row)
        return np.array(ended, np.int32)
