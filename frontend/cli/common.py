"""What the commands share: exit statuses, how errors become one line, their parser, starting an engine with its phases.

Text for programs goes to stdout, everything about it to stderr. Knows no command.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ipc.cli import build_config, make_parser, read_options
from ipc.config import EngineConfig
from ipc.errors import ConfigError, EngineDeadError, OverloadedError, RequestError, RequestFailedError
from ipc.option_help import OptionParser
from ipc.screen import Screen

EXIT_CLEAN, EXIT_START_FAILED, EXIT_USAGE, EXIT_DIED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class StartError(Exception):
    """What was to be used cannot be: no server, no model. Exit status 1."""


class UsageError(Exception):
    """The command line or an input file asks for what cannot be. Exit status 2."""


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """The exit status of a command: every expected failure is one line on stderr."""
    try:
        return command() or EXIT_CLEAN
    except UsageError as error:
        say(f"launch.py {name}: {error}")
        return EXIT_USAGE
    except (StartError, ConfigError) as error:
        say(f"launch.py {name}: {error}")
        return EXIT_START_FAILED
    except (EngineDeadError, RequestFailedError) as error:
        say(f"launch.py {name}: {error}")
        return EXIT_DIED
    except (RequestError, OverloadedError) as error:
        say(f"launch.py {name}: {error}")
        return EXIT_USAGE
    except BrokenPipeError:                      # the reader of our output has left, as `head` does
        sys.stdout = None
        return EXIT_CLEAN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def make_command_parser(name: str, description: str, *, takes_model: bool = True) -> tuple[OptionParser, Any]:
    """(parser of an engine's options, the group for the command's own)."""
    parser = make_parser(f"launch.py {name}", is_server=False, takes_model=takes_model, description=description)
    parser.own_groups.add(name)
    return parser, parser.add_argument_group(name)


def parse_command(parser: OptionParser, argv: list[str]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """(model, engine options, the command's own options)."""
    model, options = read_options(parser, argv, say)
    engine = {name: options.pop(name) for name in list(options) if name in parser.engine_options}
    return model, engine, options


def engine_config(model: str, options: dict[str, Any], screen: Screen) -> EngineConfig:
    """For AsyncLLM; what is downloaded is told on the screen."""
    return build_config(model, options, serve=False, report=screen.line)


def server_api_key(own: dict[str, Any]) -> str:
    """--api-key of a client, or the variable that gives a server its key."""
    return str(own.get("api_key") or os.environ.get("THREEFOLD_API_KEY", ""))


def read_input(words: Sequence[str], what: str) -> str:
    """The words with a blank between them, as echo has them, or standard input where there are none or only "-".
    Raises UsageError when there is nothing."""
    text = " ".join(words) if words else None
    if text is not None and text != "-":
        return text
    if text is None and sys.stdin.isatty():
        raise UsageError(f"give {what} as an argument, or on standard input")
    data = sys.stdin.read()
    if not data:
        raise UsageError(f"{what} is empty: standard input had nothing")
    return data
