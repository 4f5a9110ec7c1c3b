"""What the command line says: the few options most people need, groups of the others, and the name that was meant.

`--help` shows MAIN, `--help=all` everything, `--help=cache` one group. A flag that does not exist is answered with the
nearest one, and those of vLLM, SGLang and llama.cpp as option_answers.py has it. Knows no values and no configuration.
"""
from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ipc.option_answers import ANSWERS, FOREIGN

MAIN = frozenset({
    "model", "config", "load_format", "quantization", "dtype", "max_model_len", "offline", "kv_cache_memory",
    "kv_cache_dtype", "gpu_memory_utilization", "enable_prefix_caching", "swap_space", "max_num_seqs",
    "max_num_batched_tokens", "scheduling_policy", "device", "attention_backend", "num_threads", "tensor_parallel_size",
    "num_speculative_tokens", "enable_lora", "host", "port", "api_key", "api_servers", "served_model_name"})


class OptionParser(argparse.ArgumentParser):
    """argparse with the help and the error texts of this module. Abbreviations are refused: they would change their
    meaning when an option is added. `main`: names that plain --help shows; None: all of them."""

    def __init__(self, *, main: frozenset[str] | None = None, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **settings)
        self.main_names = main
        self.engine_options: set[str] = set()    # names that a file or the environment may set, too
        self.own_groups: set[str] = set()        # titles of groups that plain --help shows whole
        self.add_argument("-h", "--help", nargs="?", action=_Help, metavar="all|GROUP", default=argparse.SUPPRESS,
                          help="this; all: every option; or one group by name" if main else "this")

    def checked(self, argv: Sequence[str]) -> list[str]:
        """argv with underscores in flags turned into dashes. Exits with 2 at a flag that does not exist: before
        argparse, which would take its value for something else."""
        words: list[str] = []
        known = self._option_string_actions
        for index, word in enumerate(argv):
            if word == "--":
                return [*words, *argv[index:]]
            flag, equals, value = word.partition("=")
            if not flag.startswith("-") or flag == "-" or re.fullmatch(r"-\.?\d.*", flag):
                words.append(word)
                continue
            dashed = re.sub("(?<=[a-z0-9])_", "-", flag)
            if dashed in known:
                words.append(dashed + equals + value)
            elif flag[:2] not in known or flag.startswith("--"):
                self.error(unknown_flag(flag, known))
            else:
                words.append(word)               # -iFILE
        return words

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(self.checked(sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        """One line and where to read more, instead of a screen of usage."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog}: see {self.prog} --help\n")

    def help_text(self, part: str | None = None) -> str:
        """Raises KeyError for a group that does not exist."""
        if part == "all" or (part is None and self.main_names is None):
            return self.format_help()
        groups = {str(group.title): group for group in self._action_groups if group._group_actions}
        formatter = self._get_formatter()
        if part is not None:
            title = next((title for title in groups if title.lower() == part.lower()), None)
            if title is None:
                raise KeyError(", ".join(title for title in groups if title not in ("options", "positional arguments")))
            formatter.start_section(title)
            formatter.add_arguments(groups[title]._group_actions)
            formatter.end_section()
            return formatter.format_help()
        words = " ".join(str(action.metavar) for action in self._get_positional_actions())
        formatter.add_usage(f"{self.prog} {words} [options]", [], [], prefix="usage: ")
        formatter.add_text(self.description)
        num_hidden = 0
        for title, group in groups.items():
            shown = [action for action in group._group_actions if self._is_main(action, title)]
            num_hidden += len(group._group_actions) - len(shown)
            if shown:
                formatter.start_section(title)
                formatter.add_arguments(shown)
                formatter.end_section()
        names = ", ".join(title for title in groups if title not in ("options", "positional arguments"))
        formatter.add_text(f"{num_hidden} more: --help=all, or --help=GROUP with one of {names}.")
        return formatter.format_help()

    def _is_main(self, action: argparse.Action, title: str) -> bool:
        return title in ("positional arguments", *self.own_groups) or action.dest in ("help", *(self.main_names or ()))


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        if isinstance(parser, OptionParser):
            try:
                print(parser.help_text(values), end="")
            except KeyError as error:
                parser.error(f"no group {values!r}; groups are {error.args[0]}")
        parser.exit()


def unknown_flag(flag: str, known: Iterable[str]) -> str:
    """The answer to a flag that does not exist."""
    flags = set(known)
    whose, here = FOREIGN.get(flag, ("", "-"))
    if here.split()[0] in flags:
        return f"unknown option {flag} (that is {whose}'s name); did you mean {here}?"
    if flag in ANSWERS:
        return f"unknown option {flag}: {ANSWERS[flag]}"
    if whose:
        return f"unknown option {flag} ({whose}'s); there is nothing like it here"
    near = nearest(flag, flags)
    return f"unknown option {flag}" + (f"; did you mean {near}?" if near else "")


def unknown_option(name: str, known: Iterable[str]) -> str:
    """The same for an option given from Python."""
    text = unknown_flag("--" + name.replace("_", "-"), ["--" + other.replace("_", "-") for other in known])
    text = re.sub("--([a-z0-9-]+)", lambda found: found[1].replace("-", "_"), text)
    return text if ";" in text or ":" in text else f"{text}; known are {', '.join(known)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant; "" if none is close. Parts of a name may be missing or swapped."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    if close:
        return close[0]
    parts = set(re.split("[-_]", word.lower())) - {"", "no", "enable"}
    scored = [(len(parts & other) / len(parts | other), name) for name in words
              if (other := set(re.split("[-_]", name.lower())) - {"", "no", "enable"})]
    best = max(scored, default=(0.0, ""), key=lambda pair: (pair[0], -len(pair[1])))
    return best[1] if best[0] >= 0.5 else ""
