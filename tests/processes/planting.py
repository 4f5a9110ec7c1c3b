"""Faults in the processes of a real engine: a statement before or after a method, from a sitecustomize module on the
children's path. Their code is what it always is."""
from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

_SITE = """
import os, signal, sys, time
from importlib.machinery import PathFinder


def die_once(marker):
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Planter:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            owner = getattr(module, {owner!r})
            method = getattr(owner, {method!r})
            def planted(*arguments):
                {before}
                result = method(*arguments)
                {after}
                return result
            setattr(owner, {method!r}, planted)
        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Planter())
"""


class Plant:
    """Plants one fault for the children that the test starts afterwards."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.marker = folder / "died"

    def __call__(self, module: str, owner: str, method: str, *, before: str = "pass", after: str = "pass") -> None:
        """Statements that see `arguments`, `time` and `die_once`."""
        source = textwrap.dedent(_SITE).format(module=module, owner=owner, method=method, before=before, after=after)
        (self._folder / "sitecustomize.py").write_text(source)
        self._monkeypatch.setenv("PYTHONPATH", str(self._folder))

    def death(self, condition: str) -> str:
        """A statement: the process that first finds this true kills itself."""
        return f"if {condition}: die_once({str(self.marker)!r})"
