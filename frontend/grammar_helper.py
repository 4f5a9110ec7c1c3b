"""The process that tries out grammars for grammar_check.py, one at a time.

Started as `python -m frontend.grammar_helper`. It may run wild: it runs at the lowest priority, its memory is limited,
and an alarm ends it when a grammar takes too long. Reads frames from its input (length, msgpack of StructuredOutputs),
answers each with a frame of text: empty, or what is wrong. Knows no model: a grammar meets a vocabulary of bytes.
"""
from __future__ import annotations

import os
import resource
import signal
import struct
import sys

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from ipc.structured_outputs import PARSER_LIMITS, StructuredOutputs, grammar_text

TIME_S = 2.0
MEMORY_BYTES = 64 << 20                         # beyond what the idle process takes
MAX_ERROR_CHARS = 500
EOS = 256


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
        return matcher.get_error()
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error()
    return "" if any(bits) else "nothing matches it"


def main() -> None:
    os.nice(19)
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=EOS)
    decode = msgspec.msgpack.Decoder(StructuredOutputs).decode
    problem_with(StructuredOutputs(json_object=True), tokenizer, limits)        # what it needs once is not counted
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(4)) == 4:
        body = source.read(struct.unpack("<I", head)[0])
        signal.setitimer(signal.ITIMER_REAL, TIME_S)            # its default action ends the process
        try:
            answer = problem_with(decode(body), tokenizer, limits)
        except MemoryError:
            answer = "it needs too much memory"
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        data = answer[:MAX_ERROR_CHARS].encode("utf-8", "replace")
        sink.write(struct.pack("<I", len(data)) + data)
        sink.flush()


if __name__ == "__main__":
    main()
