"""The line between the supervisor and each child: a socket pair that carries a few messages and, by its end, death.

Down it come Config and Shutdown; up it go Hello, Phase, Ready and Failure. When either process ends, however it ends,
the kernel closes its side and the other reads end-of-file. PR_SET_PDEATHSIG covers a child that is not reading because
it sits in native code. Messages are those of codec.py, each preceded by nothing: the header has its length.
"""
from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from typing import Any

from ipc.codec import HEADER, Header, decode, encode, hello, read_header
from ipc.errors import WireError
from ipc.messages import Failure, Phase, Ready
from ipc.run_dir import remove_run_dir

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
FD_ARGUMENT = "--lifeline-fd"


class Lifeline:
    """One end. `receive` returns the messages that have arrived; `is_closed` turns true at end-of-file."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_closed = False
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Any) -> None:
        """Best effort: a peer that is gone shows as end-of-file on the next receive."""
        self._write(encode(message)[0])

    def hello(self, role: str, rank: int) -> None:
        self._write(hello(role, rank, os.getpid(), 0)[0])

    def _write(self, data: Any) -> None:
        try:
            self.sock.setblocking(True)
            self.sock.sendall(data)
        except OSError:
            self.is_closed = True

    def receive(self, block: bool = False) -> list[tuple[Header, Any]]:
        """Everything that has arrived, at least one message when `block` (or none at end-of-file).

        Raises WireError for bytes that are no message: the peer is not ours and the line is unusable.
        """
        messages = self._parse()
        while not self.is_closed:
            try:
                data = self.sock.recv(1 << 16, 0 if block and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                break
            self._buffer += data
            messages += self._parse()
        return messages

    def _parse(self) -> list[tuple[Header, Any]]:
        messages = []
        while len(self._buffer) >= HEADER.size:
            size = HEADER.unpack_from(self._buffer)[-1] + HEADER.size
            if size > 1 << 24:
                raise WireError(f"lifeline message of {size} bytes")
            if len(self._buffer) < size:
                break
            frame = bytes(self._buffer[:size])
            del self._buffer[:size]
            read_header(frame)
            messages.append(decode([frame]))
        return messages

    def close(self) -> None:
        self.is_closed = True
        self.sock.close()


class ChildLife:
    """What every child does with its lifeline: die with its parent, fetch its section, report."""

    def __init__(self, role: str, rank: int, lifeline: Lifeline) -> None:
        self.role, self.rank, self.lifeline = role, rank, lifeline
        self.run_dir = ""
        self.early: list[Any] = []              # messages that came right behind the section

    @staticmethod
    def from_argv(role: str, *, death_signal: int = signal.SIGKILL) -> ChildLife:
        """First statement of a child's main. argv is --lifeline-fd N --parent PID --rank R."""
        arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        if FD_ARGUMENT not in arguments:
            raise SystemExit(f"{role} is started by the supervisor: python launch.py --model MODEL")
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != int(arguments["--parent"]):         # the parent died before prctl
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the supervisor's to hear
        fd = int(arguments[FD_ARGUMENT])
        life = ChildLife(role, int(arguments["--rank"]), Lifeline(socket.socket(fileno=fd)))
        os.set_inheritable(fd, False)
        life.lifeline.hello(role, life.rank)
        return life

    def config(self, expected: type[Any]) -> Any:
        """Wait for this process's section."""
        while True:
            messages = [message for _, message in self.lifeline.receive(block=True)]
            for place, message in enumerate(messages):
                if isinstance(message, expected):
                    section = message.config
                    self.run_dir, self.early = section.run_dir, messages[place + 1:]
                    return section
            if self.lifeline.is_closed:
                self.exit_orphaned()

    def receive(self) -> list[Any]:
        """What the supervisor said since. Call once after the start too: `early` makes no descriptor readable."""
        early, self.early = self.early, []
        return early + [message for _, message in self.lifeline.receive()]

    def phase(self, name: str, fraction: float, seconds: float = 0.0, detail: str = "") -> Phase:
        message = Phase(self.role, name, fraction, seconds, detail)
        self.lifeline.send(message)
        return message

    def ready(self, detail: str = "", num_blocks: int = 0) -> None:
        self.lifeline.send(Ready(detail, num_blocks))

    def fail(self, reason: str, traceback: str = "") -> None:
        """Say why and end. Does not return."""
        self.lifeline.send(Failure(reason, traceback))
        logging.shutdown()
        os._exit(1)

    def exit_orphaned(self) -> None:
        """The supervisor is gone: leave nothing behind. Does not return."""
        remove_run_dir(self.run_dir)
        os._exit(1)
