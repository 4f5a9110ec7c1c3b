"""The private directory of one engine: its sockets, and a lock that says its supervisor lives.

    threefold-k3v9x2qa/          mode 0700, made by mkdtemp
        supervisor.pid           locked by the supervisor as long as it runs; the number is for people
        core-1  worker-0-1       ZeroMQ's sockets

The kernel drops the lock however the supervisor ends, and a lock is the same for every PID namespace that shares the
folder: a directory that nobody locks is left over from a killed engine; the next start removes it. Knows no sockets.
"""
from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time

from ipc.errors import ConfigError

RUN_DIR_PREFIX = "threefold-"
PID_FILE = "supervisor.pid"
MAX_RUN_DIR_BYTES = 72           # + "/worker-99-99999999": below the 100 bytes that an ipc:// path may have
_SETTLE_S = 60                   # a directory this young may be one whose lock is not taken yet


class RunDir:
    """A new run directory of this process. `path` is short enough for socket names."""

    def __init__(self) -> None:
        parent = _parent()
        sweep(parent)
        self.path = tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=parent)
        self._lock = os.open(os.path.join(self.path, PID_FILE), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, f"{os.getpid()}\n".encode())

    def address(self, name: str) -> str:
        """The ZeroMQ endpoint of this name."""
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """Idempotent."""
        remove_run_dir(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_run_dir(path: str) -> None:
    """Remove a run directory of ours; anything else is left alone."""
    if path and os.path.basename(path).startswith(RUN_DIR_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: str) -> list[str]:
    """Remove what killed supervisors of this user left in `parent`; the removed paths."""
    removed = []
    for entry in os.scandir(parent):
        if not entry.name.startswith(RUN_DIR_PREFIX):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and _is_abandoned(entry.path, status):
                remove_run_dir(entry.path)
                removed.append(entry.path)
        except OSError:                         # another process sweeps the same directory
            continue
    return removed


def _is_abandoned(path: str, status: os.stat_result) -> bool:
    try:
        fd = os.open(os.path.join(path, PID_FILE), os.O_RDWR)
    except FileNotFoundError:
        return time.time() - status.st_mtime > _SETTLE_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A supervisor writes its pid after locking: an empty file may be one that is between the two steps.
        return os.fstat(fd).st_size > 0 or time.time() - status.st_mtime > _SETTLE_S
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _parent() -> str:
    """The first of the runtime folder, the temporary folder and /tmp that is usable and short."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        length = len(os.fsencode(folder)) + len(f"/{RUN_DIR_PREFIX}") + 8
        if os.path.isabs(folder) and length <= MAX_RUN_DIR_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ConfigError(f"sockets need a writable folder with a path under {MAX_RUN_DIR_BYTES - 19} bytes, and neither "
                      f"{tempfile.gettempdir()} nor /tmp is one; set TMPDIR to one")
