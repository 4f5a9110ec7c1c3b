"""How another program finds a running engine: a small file in its run directory, written by the supervisor.

    threefold-k3v9x2qa/engine.json       where the core listens, and which model it runs

The folder is private to its user, and so is the file. It is replaced when the core is; it goes with the folder when the
engine ends. Knows no sockets.
"""
from __future__ import annotations

import os

import msgspec

from ipc.config import ModelSection, Peer
from ipc.errors import ConfigError

FILE = "engine.json"


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a frontend must know to attach."""
    core: Peer
    model: ModelSection
    served_model_name: str = ""


def write_engine_file(run_dir: str, engine: EngineFile) -> None:
    """Replace the file at once: a reader sees the old one or the new one."""
    path = os.path.join(run_dir, FILE)
    with open(f"{path}.new", "wb") as file:
        file.write(msgspec.json.encode(engine))
    os.rename(f"{path}.new", path)


def read_engine_file(run_dir: str) -> EngineFile:
    """Raises ConfigError: no engine runs there, or one of another version."""
    try:
        with open(os.path.join(run_dir, FILE), "rb") as file:
            return msgspec.json.decode(file.read(), type=EngineFile)
    except OSError as error:
        raise ConfigError(f"no engine serves in {run_dir}: {error.strerror}; name the run directory that launch.py "
                          "prints, or AsyncLLM.run_dir") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the engine in {run_dir} is of another version: {error}") from None
