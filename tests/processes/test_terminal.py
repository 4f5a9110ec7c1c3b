"""launch.py chat as people use it: on a pseudo-terminal, with Ctrl-C; and commands whose output is a pipe."""
from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from ipc.child import ROOT
from tests.conftest import RunningEngine
from tests.processes.tools import HARD_TIMEOUT_S, engine_environment, wait_idle

pytestmark = pytest.mark.timeout(90)


class Terminal:
    """A command on a pseudo-terminal; `expect` reads until a text has come."""

    def __init__(self, *argv: str, temp: str) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, os.path.join(ROOT, "launch.py"), *argv]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                                        env={**engine_environment(temp), "TERM": "xterm"})
        os.close(slave)
        self.seen = ""

    def expect(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + HARD_TIMEOUT_S
        while self.seen.count(text) < count:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """What the kernel does at Ctrl-C, to the one process of the foreground."""
        os.kill(self.process.pid, signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C again if the first came before the program waited for a key: readline notices it at the next."""
        deadline = time.monotonic() + HARD_TIMEOUT_S
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            self.interrupt()
            while text not in self.seen and select.select([self.master], [], [], 0.5)[0]:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")

    def end(self) -> int:
        """The exit status. Reads on, so that the program can write its last lines."""
        while self.process.poll() is None:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        os.close(self.master)
        return self.process.wait(HARD_TIMEOUT_S)


def test_ctrl_c_stops_the_answer_and_not_the_chat(engine: RunningEngine, temp: str) -> None:
    terminal = Terminal("chat", "--url", engine.server.url, "--temperature", "0", temp=temp)
    try:
        talk(terminal, engine)
    finally:
        terminal.process.kill()
        terminal.process.wait()


def talk(terminal: Terminal, engine: RunningEngine) -> None:
    terminal.expect("you> ")
    terminal.type("Tell me everything\n")
    terminal.expect("tok/s")                                     # the status line: the answer streams
    terminal.interrupt()
    terminal.expect("you> ", 2)
    assert "stopped" in terminal.seen and "tok/s" in terminal.seen
    engine.loop.run(wait_idle(engine.llm))                       # the server aborted the request
    terminal.type("/stats\n")
    terminal.expect("together")
    terminal.expect("you> ", 3)
    terminal.interrupt_until("Ctrl-D or /quit ends the program")  # at the prompt it clears the line
    terminal.type("/quit\n")
    assert terminal.end() == 0, terminal.seen
    assert "Traceback" not in terminal.seen


def test_a_reader_that_leaves_early_is_no_error(tiny_model: str, temp: str) -> None:
    """As in `launch.py tokenize ... | head -1`."""
    command = [sys.executable, os.path.join(ROOT, "launch.py"), "tokenize", "--model", tiny_model, "word " * 20000]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=engine_environment(temp))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(HARD_TIMEOUT_S) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_command_that_is_nearly_one_is_named(temp: str) -> None:
    result = subprocess.run([sys.executable, os.path.join(ROOT, "launch.py"), "docter"], capture_output=True, text=True,
                            env=engine_environment(temp), timeout=HARD_TIMEOUT_S)
    assert (result.returncode, result.stderr) == (2, "launch.py: there is no command docter; did you mean doctor?\n")
