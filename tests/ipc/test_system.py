"""Limits that a process sets for itself."""
from __future__ import annotations

import subprocess
import sys

from ipc.child import ROOT


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes_and_never_lowered() -> None:
    code = ("import resource, sys; sys.path.insert(0, sys.argv[1])\n"
            "from ipc.system import allow_descriptors\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))\n"
            "print([allow_descriptors(n) for n in (50, 300, 200, 9000)], resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = subprocess.run([sys.executable, "-c", code, ROOT], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[100, 300, 300, 500] (500, 500)", done.stderr
