"""The line between supervisor and child: messages in pieces, death as end-of-file, children that do not outlive it."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ipc import codec
from ipc.codec import check_hello
from ipc.config import CacheConfig
from ipc.errors import WireError
from ipc.lifeline import FD_ARGUMENT, ChildLife, Lifeline
from ipc.messages import ConfigCore, Failure, Phase, Ready, Shutdown
from tests.ipc.message_samples import filled

ROOT = os.path.dirname(os.path.dirname(codec.__file__))


@pytest.fixture
def ends() -> Iterator[tuple[Lifeline, Lifeline]]:
    a, b = (Lifeline(sock) for sock in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def messages(line: Lifeline, block: bool = False) -> list:
    return [message for _, message in line.receive(block)]


def test_messages_arrive_in_order(ends):
    a, b = ends
    a.hello("worker", 1)
    a.send(Phase("worker", "load", 0.5))
    a.send(Ready("x"))
    received = b.receive(block=True)
    assert check_hello(received[0][0]) == ("worker", 1, os.getpid())
    assert [message for _, message in received[1:]] == [Phase("worker", "load", 0.5), Ready("x")]
    assert messages(b) == [] and not b.is_closed


def test_a_message_in_pieces_is_put_together(ends):
    a, b = ends
    data = bytes(codec.encode(Ready("ready"))[0])
    for byte in data:
        assert messages(b) == []
        a.sock.sendall(bytes([byte]))
    assert messages(b) == [Ready("ready")]


def test_what_comes_right_behind_the_section_is_not_lost(ends):
    """News of a worker's successor went with the core's section: the core waited for the dead one for ever."""
    a, b = ends
    life = ChildLife("engine_core", 0, b)
    config = filled(ConfigCore)
    for message in (Ready("stale"), config, Shutdown("now"), Ready("late")):
        a.send(message)
    assert life.config(ConfigCore) == config.config
    a.send(Ready("later"))
    assert life.receive() == [Shutdown("now"), Ready("late"), Ready("later")] and life.receive() == []


def test_a_large_message_arrives_whole(ends):
    a, b = ends
    failure = Failure("reason", "x" * 100_000)
    a.send(failure)
    assert messages(b, block=True) == [failure]


def test_what_was_sent_before_the_end_is_still_read(ends):
    a, b = ends
    a.send(Failure("why"))
    a.close()
    assert messages(b) == [Failure("why")] and b.is_closed
    assert messages(b, block=True) == []


def test_sending_to_a_peer_that_is_gone_is_not_an_error(ends):
    a, b = ends
    b.close()
    a.send(Ready("x"))
    a.send(Ready("y"))
    assert a.is_closed


@pytest.mark.parametrize("data", [b"x" * 64, b"TF3F" + b"\xff" * 28])
def test_bytes_that_are_no_message_make_the_line_unusable(ends, data):
    a, b = ends
    a.sock.sendall(data)
    with pytest.raises(WireError):
        b.receive()


def test_a_childs_section_is_what_its_supervisor_sends(ends):
    a, b = ends
    config = filled(ConfigCore)
    a.send(Shutdown("not yet"))
    a.send(config)
    life = ChildLife("engine_core", 0, b)
    assert life.config(ConfigCore) == config.config and life.run_dir == config.config.run_dir
    assert isinstance(config.config.cache, CacheConfig)
    life.phase("load", 1.0, 2.0, "all")
    life.ready("serving")
    assert messages(a) == [Phase("engine_core", "load", 1.0, 2.0, "all"), Ready("serving")]


def test_a_child_started_by_hand_says_how_it_is_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["worker"])
    with pytest.raises(SystemExit, match="worker is started by the supervisor: python launch.py"):
        ChildLife.from_argv("worker")


# ---------------------------------------------------------------- with processes

CHILD = """
import sys, time
from ipc.lifeline import ChildLife
from ipc.messages import ConfigCore
life = ChildLife.from_argv("worker")
what = sys.argv[-1]
if what == "fail":
    life.fail("port taken", "Traceback ...")
if what == "config":
    life.config(ConfigCore)
life.ready("up")
time.sleep(60)
"""


def start_child(what: str, parent: int | None = None) -> tuple[subprocess.Popen, Lifeline]:
    mine, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, FD_ARGUMENT, str(theirs.fileno()), "--parent", str(parent or os.getpid()),
         "--rank",
         "2", "--what", what], pass_fds=[theirs.fileno()], cwd=ROOT)
    theirs.close()
    return process, Lifeline(mine)


def test_a_child_says_hello_first_and_its_reason_last():
    process, line = start_child("fail")
    received = []
    while not line.is_closed:
        received += line.receive(block=True)
    assert check_hello(received[0][0]) == ("worker", 2, process.pid)
    assert [message for _, message in received[1:]] == [Failure("port taken", "Traceback ...")]
    assert process.wait(10) == 1
    line.close()


def test_a_child_that_waits_for_its_section_ends_with_its_supervisor():
    process, line = start_child("config")
    line.receive(block=True)
    line.close()                                # as the kernel does for a supervisor that was killed
    assert process.wait(10) == 1


def test_a_child_whose_parent_is_gone_already_does_not_start():
    process, line = start_child("idle", parent=1)
    assert process.wait(10) == 1
    line.close()


def test_a_child_does_not_hear_ctrl_c():
    process, line = start_child("idle")
    received = line.receive(block=True)
    while len(received) < 2:
        received += line.receive(block=True)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.kill()
    process.wait(10)
    line.receive(block=True)
    assert line.is_closed
    line.close()
