"""`launch.py chat`: talk to a model in the terminal, on a running server or an engine started for it.

    you> hello                    Ctrl-C stops an answer and keeps it; at the prompt it clears the line. Ctrl-D ends.
    /system TEXT  /regen  /clear  /stats  /save FILE  /help  /quit

Off a terminal each line of standard input is one message, answers go to standard output and nothing else does.
"""
from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from frontend.cli.answer import Answer
from frontend.cli.common import (EXIT_CLEAN, UsageError, engine_config, make_command_parser, parse_command, run_command,
                                 say, server_api_key)
from frontend.cli.source import EngineSource, ServerSource, Source, find_server
from frontend.cli.terminal import Terminal
from ipc.aliases import DEMO_ALIAS
from ipc.errors import OverloadedError, RequestError, RequestFailedError
from ipc.screen import Screen

HELP = """  /system TEXT   set the system message (no text: show it); the conversation goes on
  /regen         answer the last message again
  /clear         forget the conversation
  /stats         figures of all answers so far
  /save FILE     write the conversation as JSON messages
  /quit          end (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""


class Chat:
    """The conversation and what is typed into it. `handle` takes one line and returns False at the end."""

    def __init__(self, source: Source, terminal: Terminal, params: dict[str, Any], system: str = "") -> None:
        self.source, self.terminal, self.params, self.system = source, terminal, params, system
        self.messages: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self.is_talkative = terminal.is_terminal

    def handle(self, line: str) -> bool:
        """One line: a command or a message."""
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self.messages.append({"role": "user", "content": text})
            self.answer()
            return True
        command, _, rest = text[1:].partition(" ")
        handlers = {"system": self.set_system, "regen": self.regenerate, "clear": self.clear, "stats": self.show_stats,
                    "save": self.save, "help": lambda _: say(HELP)}
        if command in ("quit", "exit", "q"):
            return False
        if command in handlers:
            handlers[command](rest.strip())
        else:
            say(f"no command /{command}; known are /{', /'.join(handlers)}, /quit")
        return True

    def answer(self) -> None:
        """Stream the answer to the conversation so far. Ctrl-C keeps what came; a refusal takes the message back."""
        answer = Answer()
        system = [{"role": "system", "content": self.system}] if self.system else []
        self.terminal.begin()
        try:
            with contextlib.closing(self.source.chat([*system, *self.messages], self.params)) as pieces:  # type: ignore
                for piece in answer.follow(pieces):
                    if piece.reasoning:
                        self.terminal.text(piece.reasoning, is_dim=True)
                    if piece.text:
                        if answer.reasoning and answer.text == piece.text:
                            self.terminal.text("\n\n")
                        self.terminal.text(piece.text)
                    self.terminal.status(f"{self.source.name} · {answer.figures()} · Ctrl-C stops")
        except KeyboardInterrupt:
            answer.is_stopped = True
        except (RequestError, OverloadedError, RequestFailedError) as error:
            self.messages.pop()
            self.terminal.end()
            say(f"refused: {error}")
            if not self.is_talkative:
                raise
            return
        finally:
            self.terminal.end()
        self.terminal.text("\n")
        if answer.text or not answer.is_stopped:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        self.answers.append(answer)
        if self.is_talkative:
            say(self.terminal.dim(f"  {answer.figures()}"))

    # ------------------------------------------------------------ commands

    def set_system(self, text: str) -> None:
        self.system = text or self.system
        say(f"system: {self.system or '(none)'}")

    def regenerate(self, _: str) -> None:
        if not any(message["role"] == "user" for message in self.messages):
            say("there is no message to answer yet")
            return
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.answer()

    def clear(self, _: str) -> None:
        self.messages.clear()
        say("the conversation is empty")

    def show_stats(self, _: str) -> None:
        say(f"{self.source.name} at {self.source.where}: {len(self.answers)} answers, {len(self.messages)} messages")
        for number, answer in enumerate(self.answers, 1):
            say(f"  {number}: {answer.figures()}")
        if self.answers:
            prompt = sum(max(0, answer.num_prompt_tokens) for answer in self.answers)
            cached = sum(max(0, answer.num_cached_tokens) for answer in self.answers)
            total = sum(answer.num_output_tokens for answer in self.answers)
            say(f"  together {total} tokens; {cached} of {prompt} prompt tokens came from the cache")

    def save(self, path: str) -> None:
        if not path:
            say("/save needs a file name")
            return
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            with open(os.path.expanduser(path), "w", encoding="utf-8") as file:
                json.dump({"model": self.source.name, "messages": [*system, *self.messages]}, file, ensure_ascii=False,
                          indent=1)
        except OSError as error:
            say(f"{path}: {error.strerror or error}")
        else:
            say(f"{len(self.messages)} messages are in {path}")

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Until /quit or the end of the input."""
        is_typed = sys.stdin.isatty()
        if is_typed:
            with contextlib.suppress(ImportError):
                import readline                  # noqa: F401 - input() then edits lines and remembers them
            say(f"{self.source.name} at {self.source.where}. /help lists commands, Ctrl-D ends.")
        while True:
            try:
                line = input("you> " if is_typed else "")
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + input("...> " if is_typed else "")
                if not self.handle(line):
                    return EXIT_CLEAN
            except EOFError:
                if is_typed:
                    print(file=sys.stderr)
                return EXIT_CLEAN
            except KeyboardInterrupt:
                if not is_typed:
                    raise
                say("   (Ctrl-D or /quit ends the program)")


# ---------------------------------------------------------------- options that chat and complete share

def add_sampling_options(group: Any) -> None:
    """Names and values of SamplingParams."""
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: what fits)")
    group.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    group.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this total share")
    group.add_argument("--top-k", type=int, metavar="K", help="sample from this many likeliest tokens")
    group.add_argument("--sampling-seed", type=int, metavar="N", help="the same seed gives the same answer")


def add_source_options(group: Any) -> None:
    """Where the answers come from."""
    group.add_argument("--url", help="use this server. Without --url and a model: the one at 127.0.0.1:8000 if it "
                       f"answers, else an engine with {DEMO_ALIAS}")
    group.add_argument("--api-key", default="", metavar="KEY", help="of the server (default: THREEFOLD_API_KEY)")


def sampling_of(own: dict[str, Any]) -> dict[str, Any]:
    """The sampling options that were given, under their names in requests."""
    names = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
             "sampling_seed": "seed"}
    return {there: own[here] for here, there in names.items() if here in own}


def open_source(model: str | None, engine: dict[str, Any], own: dict[str, Any]) -> Source:
    """A server or an engine, as the options ask. Raises StartError, ConfigError, UsageError."""
    url = own.get("url")
    if url:
        if engine:
            raise UsageError(f"--url attaches to a server that runs; --{next(iter(engine)).replace('_', '-')} is for "
                             "starting an engine: drop one of them")
        return ServerSource(url, model, server_api_key(own))
    if model is None and not engine and (server := find_server(server_api_key(own))) is not None:
        return server
    screen = Screen()
    options = {"log_level": "warning", **engine}   # what an engine says for operators would stand between the answers
    return EngineSource(engine_config(model or DEMO_ALIAS, options, screen), screen)


def main(argv: list[str]) -> int:
    parser, group = make_command_parser("chat", "Talk to a model in the terminal.")
    add_source_options(group)
    group.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_sampling_options(group)

    def command() -> int:
        model, engine, own = parse_command(parser, argv)
        source = open_source(model, engine, own)
        try:
            return Chat(source, Terminal(), sampling_of(own), own["system"]).run()
        finally:
            source.close()
    return run_command("chat", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
