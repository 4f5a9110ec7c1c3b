#!/usr/bin/env python3
"""Threefold: an LLM serving engine in three kinds of process.

    python launch.py demo                     set up, fetch a small model, serve it and ask it one question
    python launch.py --model MODEL [options]  serve: an alias (qwen3-8b), a folder, a .gguf file or a hub id
    python launch.py serve --help             the main serving options; --help=all: all of them
    python launch.py chat [MODEL | --url URL] talk to a model in the terminal
    python launch.py complete PROMPT          one completion; also from standard input
    python launch.py run-batch -i IN -o OUT   answer an OpenAI batch file; goes on where it was interrupted
    python launch.py tokenize TEXT            token ids and pieces of a text or chat
    python launch.py models                   short names, what each needs, what is cached
    python launch.py profile [--url URL]      where the time goes: scheduler, device, what bounds it
    python launch.py top [--url URL]          a running server at a glance, refreshed each second
    python launch.py doctor                   examine machine and installation; ends in OK or the fixes
    python launch.py setup [--torch cpu|cuda|INDEX] [--extra NAME ...]
                                              make .venv beside this file; INDEX: the URL of a wheel index for torch
    python launch.py --version
    python launch.py test [pytest arguments]  set up with the test extra and run the tests
    python launch.py bench NAME [arguments]   measure: bench serve, offline, latency, ...; each has --help
    python launch.py tune                     measure the compiled kernels of this machine once
    python launch.py replay FILE              make every decision of a flight recording again
    python launch.py simulate | chaos | fuzz | soak
                                              look for faults: a simulated worker, kills, hostile input, hours of load

Needs Python 3.11 and pip. A Python that already has the packages is used as it is; otherwise .venv is.
"""
# Readable by old Pythons, and standard library only: it runs before anything is installed, and must say what is wrong.
from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGES = ("ipc", "engine_core", "worker", "frontend", "bench", "tests")


def setup(argv: list[str]) -> int:
    from ipc.launch_setup import ensure
    from ipc.option_help import OptionParser
    parser = OptionParser(prog="launch.py setup")
    parser.add_argument("--torch", default="", metavar="cpu|cuda|INDEX",
                        help="build of torch; INDEX: URL of a wheel index. Default: cuda where an NVIDIA driver is")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME",
                        help="triton, fuzz, otel or test; repeatable")
    args = parser.parse_args(argv)
    ensure(args.extra, args.torch)
    say("launch.py: set up; packages are those of {}".format(sys.executable))
    return 0


def test(argv: list[str]) -> int:
    from ipc.launch_setup import ensure
    ensure(["test"])
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *argv])


def bench(argv: list[str]) -> int:
    folder = os.path.join(ROOT, "bench")
    files = sorted(name for name in os.listdir(folder) if name.endswith(".py"))
    known = [name[:-3] for name in files if _has_main(os.path.join(folder, name))]
    name = argv[0].replace("-", "_") if argv else ""
    name = {"throughput": "offline"}.get(name, name)      # vLLM's name
    if name not in known:
        names = "bench needs a name: {}".format(", ".join(known))
        if argv and argv[0] in ("-h", "--help"):
            print(names)
            return 0
        near = nearest(name, known)
        raise CommandError("there is no bench {}; did you mean {}?".format(argv[0], near) if near else names)
    return module_command("bench." + name, argv[1:])


def replay(argv: list[str]) -> int:
    return module_command("engine_core.replay", argv)


def simulate(argv: list[str]) -> int:
    return module_command("bench.simulate", argv)


def chaos(argv: list[str]) -> int:
    return module_command("bench.chaos", argv)


def fuzz(argv: list[str]) -> int:
    return module_command("bench.fuzz", argv)


def soak(argv: list[str]) -> int:
    return module_command("bench.soak", argv)


def chat(argv: list[str]) -> int:
    return module_command("frontend.cli.chat", argv)


def complete(argv: list[str]) -> int:
    return module_command("frontend.cli.complete", argv)


def run_batch(argv: list[str]) -> int:
    return module_command("frontend.cli.run_batch", argv)


def tokenize(argv: list[str]) -> int:
    return module_command("frontend.cli.tokenize", argv)


def models(argv: list[str]) -> int:
    return module_command("frontend.cli.models", argv)


def tune(argv: list[str]) -> int:
    return module_command("worker.linear.tune", argv)


def profile(argv: list[str]) -> int:
    return module_command("frontend.cli.profile", argv)


def top(argv: list[str]) -> int:
    return module_command("frontend.cli.top", argv)


def doctor(argv: list[str]) -> int:
    """Also where nothing is installed: then that is what it tells."""
    from ipc.launch_setup import SetupError, ensure
    try:
        ensure(may_install=False)
    except SetupError:
        pass
    return int(load("ipc.doctor").main(argv))


def module_command(name: str, argv: list[str]) -> int:
    from ipc.launch_setup import ensure
    note_foreign_packages()
    ensure(may_install=False)
    return int(load(name).main(argv) or 0)


def _has_main(path: str) -> bool:
    """A main that takes arguments: the others are started by a benchmark, in a process of their own."""
    with open(path, encoding="utf-8") as file:
        return "\ndef main(argv" in file.read()


def serve(argv: list[str], is_demo: bool = False) -> int:
    from ipc.launch_setup import STARTED, ensure
    ensure(may_install=is_demo)
    note_foreign_packages()
    started = float(os.environ.pop(STARTED))
    return int(load("ipc.launch_serve").main(argv, is_demo=is_demo, started=started))


def demo(argv: list[str]) -> int:
    return serve(argv, is_demo=True)


def load(name: str) -> Any:
    """Import one of our modules; ours, whatever else is called like it."""
    module = importlib.import_module(name)
    file = os.path.abspath(str(module.__file__))
    if not file.startswith(ROOT + os.sep):
        from ipc.launch_setup import SetupError
        raise SetupError("{} came from {}, not from {}; take that folder off PYTHONPATH".format(name, file, ROOT))
    return module


def note_foreign_packages() -> None:
    """Ours come first here and in every child. A folder of the user's with the same name is not imported: say so."""
    for folder in dict.fromkeys(os.path.realpath(path) for path in ["", *sys.path]):
        if folder == os.path.realpath(ROOT) or "-packages" in folder or not os.path.isdir(folder):
            continue
        names = [name for name in PACKAGES if os.path.isdir(os.path.join(folder, name))
                 or os.path.isfile(os.path.join(folder, name + ".py"))]
        if names:
            say("launch.py: not used: {} in {}; here these names mean Threefold's own, in {}".format(
                ", ".join(names), folder, ROOT))


class CommandError(Exception):
    """No such command. Exit status 2."""


def nearest(word: str, known: Any) -> str:
    import difflib
    return "".join(difflib.get_close_matches(word, known, n=1, cutoff=0.7))


def check_command(word: str, commands: Any) -> None:
    """A word that is neither a command nor looks like a model, but is nearly a command, is a typing error."""
    if word in commands or not word.replace("-", "").isalpha() or word.startswith("-") or os.path.exists(word):
        return
    near = nearest(word, commands)
    if near:
        raise CommandError("there is no command {}; did you mean {}?".format(word, near))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    if sys.version_info < (3, 11):
        say("launch.py: Threefold needs Python 3.11 or newer, this is {} at {}; try python3.12 launch.py".format(
            sys.version.split()[0], sys.executable))
        return 1
    sys.path[:] = [ROOT, *(path for path in sys.path if path != ROOT)]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return 0 if argv else 2
    if argv[0] == "--version":
        from ipc import VERSION
        print("Threefold {}".format(VERSION))
        return 0
    from ipc.launch_setup import STARTED, SetupError
    os.environ.setdefault(STARTED, repr(time.monotonic()))
    commands = {"demo": demo, "serve": serve, "setup": setup, "test": test, "bench": bench,
                "replay": replay, "simulate": simulate, "chaos": chaos, "fuzz": fuzz, "soak": soak,
                "profile": profile, "top": top, "tune": tune, "chat": chat, "complete": complete,
                "run-batch": run_batch, "tokenize": tokenize, "models": models, "doctor": doctor,
                "collect-env": doctor}                    # vLLM's name
    try:
        check_command(argv[0], commands)
        return commands[argv[0]](argv[1:]) if argv[0] in commands else serve(argv)
    except CommandError as error:
        say("launch.py: {}".format(error))
        return 2
    except SetupError as error:
        say("launch.py: {}".format(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in PACKAGES:
            raise
        say("launch.py: the package {} is missing; run: python launch.py setup".format(error.name))
    except KeyboardInterrupt:
        say("launch.py: stopped")
        return 130
    except ValueError as error:
        from ipc.errors import ConfigError
        if not isinstance(error, ConfigError):
            raise
        say("launch.py: {}".format(error))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
