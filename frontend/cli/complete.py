"""`launch.py complete`: one prompt, from the command line or standard input; the text goes to standard output as it
comes.

    echo "Once upon a time" | python launch.py complete --model smollm2-135m --max-tokens 50
"""
from __future__ import annotations

import contextlib
import json
import sys

from frontend.cli.answer import Answer
from frontend.cli.chat import add_sampling_options, add_source_options, open_source, sampling_of
from frontend.cli.common import EXIT_INTERRUPTED, make_command_parser, parse_command, read_input, run_command, say

DEFAULT_MAX_TOKENS = 128


def main(argv: list[str]) -> int:
    parser, group = make_command_parser("complete", "Complete one prompt.", takes_model=False)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT",
                        help="words are joined by blanks; - or nothing: standard input")
    add_source_options(group)
    group.add_argument("--chat", action="store_true", default=False, help="send it as a message (chat template)")
    group.add_argument("--echo", action="store_true", default=False, help="print the prompt in front")
    group.add_argument("--json", action="store_true", default=False, help="print one JSON object with text and figures")
    add_sampling_options(group)

    def command() -> int:
        model, engine, own = parse_command(parser, argv)
        prompt = read_input(own.get("prompt", ()), "a prompt")
        params = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling_of(own)}
        source = open_source(model, engine, own)
        answer = Answer()
        try:
            pieces = (source.chat([{"role": "user", "content": prompt}], params) if own["chat"]
                      else source.complete(prompt, params))
            with contextlib.closing(pieces):     # type: ignore[type-var]
                if own["echo"] and not own["json"]:
                    print(prompt, end="", flush=True)
                for piece in answer.follow(pieces):
                    if not own["json"]:
                        print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            answer.is_stopped = True
        finally:
            source.close()
        if own["json"]:
            print(json.dumps({"model": source.name, "text": (prompt if own["echo"] else "") + answer.text,
                              "finish_reason": "abort" if answer.is_stopped else answer.finish_reason,
                              "prompt_tokens": answer.num_prompt_tokens, "cached_tokens": answer.num_cached_tokens,
                              "output_tokens": answer.num_output_tokens, "ttft_s": round(answer.ttft_s, 6),
                              "tokens_per_s": round(answer.tokens_per_s, 2)}))
        else:
            print()
            if sys.stderr.isatty():
                say(f"  {answer.figures()}")
        return EXIT_INTERRUPTED if answer.is_stopped else 0
    return run_command("complete", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
