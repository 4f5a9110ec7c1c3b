"""What the supervisor takes from the operating system: signals and process ends as descriptors, the listening socket.

Knows no processes of ours.
"""
from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from types import FrameType
from typing import Any

from ipc.errors import ConfigError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """SIGINT, SIGTERM and SIGHUP as a readable descriptor, while the context lasts. Main thread only."""

    def __enter__(self) -> SignalPipe:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._old: dict[int, Any] = {}
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue                         # started under nohup
            self._old[number] = signal.signal(number, _heard)
        return self

    def fileno(self) -> int:
        return self._read.fileno()

    def drain(self) -> int:
        """How many of them came since the last call."""
        try:
            return sum(number in self._old for number in self._read.recv(64))
        except BlockingIOError:
            return 0

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._read.close()
        self._write.close()


def _heard(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor tells the loop; a handler is only needed so that the default action does not happen."""


def bind_listener(host: str, port: int) -> socket.socket:
    """The engine's TCP socket. It listens from now on: a client that comes early waits instead of being refused, a
    second engine is refused at once, and a frontend can be replaced. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except PermissionError:
        listener.close()
        raise ConfigError(f"port {port} on {host} needs root; choose one above 1023 with --port") from None
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken; choose another with --port") from None
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}; see --host and --port") from None
    return listener


def bind_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """One listening socket on the same port for each of `count` processes; the kernel spreads connections over them.

    All stay open here, so those of a process that has ended wait for its successor. Another engine on this port is an
    error as with one socket: the port is first bound alone. Raises ConfigError.
    """
    first = bind_listener(host, port)
    if count == 1:
        return [first]
    address = first.getsockname()
    first.close()
    listeners = []
    try:
        for _ in range(count):
            listener = socket.socket(first.family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(2048)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(f"cannot listen {count} times on {host}, port {port}: {error.strerror}; see --api-servers"
                          ) from None
    return listeners


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends, -1 where the kernel has none.

    Raises ProcessLookupError when there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return -1


def describe_status(status: int) -> str:
    """Of a Popen.returncode."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def is_running(pid: int) -> bool:
    """Also False for a zombie, which has ended: only its parent has not asked yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] != b"Z"
    except OSError:
        return False


def allow_descriptors(count: int) -> int:
    """Raise this process's soft limit to `count` open files, as far as the hard one allows. The limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
