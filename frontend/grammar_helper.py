"""The processes that try out grammars for grammar_check.py, one at a time.

Started at a low priority. The first one does nothing but fork: a child that is warm, may run wild, and ends when a
grammar takes too much memory or, by an alarm, too much CPU; then it says so and forks the next. Its input has frames of
msgpack of StructuredOutputs behind their length; each is answered with a head, bytes of text and seconds of CPU, and a
text: empty, or what is wrong. Knows no model: a grammar meets a vocabulary of bytes.
"""
from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import sys
import time

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from ipc.priority import pausing
from ipc.structured_outputs import CHECK_ANSWER, PARSER_LIMITS, StructuredOutputs, grammar_text, one_line

TIME_S = 2.0                                    # of CPU: on a busy machine a sound grammar takes longer
MEMORY_BYTES = 64 << 20                         # beyond what the idle process takes
MAX_ERROR_CHARS = 500
EOS = 256
TOO_MUCH = (f"it takes more than {TIME_S:g} s or {MEMORY_BYTES >> 20} MB to compile; make it smaller: fewer "
            "alternatives, shorter repetitions")


class _Bytes:
    """A vocabulary of bytes, as the library asks for it."""
    eos_token_id, bos_token_id, special_token_ids = EOS, None, [EOS]
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def problem_with(spec: StructuredOutputs, tokenizer: LLTokenizer, limits: LLParserLimits) -> str:
    """Why this cannot be used; empty when it can."""
    try:
        text = grammar_text(spec, any_to_lark)
    except (ValueError, RecursionError) as error:
        return str(error) or type(error).__name__
    except Exception as error:                  # the converter raises plain Exception for a syntax error
        return f"it is neither Lark nor GBNF: {error}"
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        return one_line(matcher.get_error())
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        return one_line(matcher.get_error())
    return "" if any(bits) else "nothing matches it"


def answer(problem: str, seconds: float = 0.0) -> None:
    data = problem[:MAX_ERROR_CHARS].encode("utf-8", "replace")
    sys.stdout.buffer.write(CHECK_ANSWER.pack(len(data), seconds) + data)
    sys.stdout.buffer.flush()


def serve(tokenizer: LLTokenizer, limits: LLParserLimits, is_busy: mmap.mmap) -> None:
    """In the child: until the input ends."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    decode = msgspec.msgpack.Decoder(StructuredOutputs).decode
    source = sys.stdin.buffer
    while len(head := source.read(4)) == 4:
        body = source.read(struct.unpack("<I", head)[0])
        is_busy[0] = 1
        began = time.thread_time()              # a running timer makes the process's time coarse
        signal.setitimer(signal.ITIMER_PROF, TIME_S)            # its default action ends the process
        try:
            with pausing():
                problem = problem_with(decode(body), tokenizer, limits)
        except MemoryError:
            problem = "it needs too much memory"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        is_busy[0] = 0
        answer(problem, time.thread_time() - began)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=EOS)
    problem_with(StructuredOutputs(json_object=True), tokenizer, limits)        # what it needs once is not counted
    is_busy = mmap.mmap(-1, 1)                                  # shared with the child
    while True:
        child = os.fork()
        if child == 0:
            serve(tokenizer, limits, is_busy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        if is_busy[0]:                                          # else nobody waits
            is_busy[0] = 0
            answer(TOO_MUCH)


if __name__ == "__main__":
    main()
