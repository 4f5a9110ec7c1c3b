"""Where option values come from besides the command line: a file (--config) and the environment (THREEFOLD_*).

The command line wins over the environment, the environment over the file, the file over the defaults. A name that is no
option is refused in a file, with the nearest one; in the environment it is only told, for others may use the prefix.
Knows which options exist because it is told; values are checked where all others are.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.option_help import nearest

PREFIX = "THREEFOLD_"
NOT_OPTIONS = frozenset({"STARTED", "IN_VENV"})  # launch.py's own
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_MAX_BYTES = 1 << 20


def read_config_file(path: str, names: Collection[str], groups: Collection[str]) -> dict[str, Any]:
    """Option name -> value. Keys are flags without "--", with dashes or underscores; tables named as the groups of
    --help may hold them. Raises ConfigError."""
    read = _reader(path)
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"--config {path}: larger than {_MAX_BYTES >> 20} MiB; this is no file of options")
    try:
        content = read(data)
    except ImportError:
        raise ConfigError(f"--config {path}: reading YAML needs the package pyyaml; install it, or write TOML or "
                          "JSON") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected names and values, found {type(content).__name__}")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        inside = value if isinstance(value, dict) and str(key) in groups else {key: value}
        for name, one in inside.items():
            option = str(name).removeprefix("--").replace("-", "_")
            if option not in names:
                near = nearest(option, names)
                raise ConfigError(f"--config {path}: unknown option {name!r}" +
                                  (f"; did you mean {near}?" if near else ""))
            if option in flat:
                raise ConfigError(f"--config {path}: {name!r} is there twice; keep one")
            flat[option] = one
    return flat


def _reader(path: str) -> Callable[[bytes], Any]:
    kind = os.path.splitext(path)[1].lower()
    readers: dict[str, Callable[[bytes], Any]] = {
        ".json": msgspec.json.decode, ".toml": msgspec.toml.decode, ".yaml": msgspec.yaml.decode,
        ".yml": msgspec.yaml.decode}
    if kind not in readers:
        raise ConfigError(f"--config {path}: the name must end in {', '.join(readers)}")
    return readers[kind]


def read_environment(environ: Mapping[str, str], is_bool: Mapping[str, bool],
                     report: Callable[[str], None]) -> dict[str, Any]:
    """Option name -> text or bool, of every THREEFOLD_<OPTION> that is set and not empty. Raises ConfigError."""
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text or variable[len(PREFIX):] in NOT_OPTIONS:
            continue
        name = variable[len(PREFIX):].lower()
        if name not in is_bool:
            if near := nearest(name, is_bool):   # else it is somebody else's
                report(f"{variable} in the environment is no option; did you mean {PREFIX}{near.upper()}?")
            continue
        if is_bool[name]:
            if text.strip().lower() not in _WORDS:
                raise ConfigError(f"{variable} is {text!r}; write 1 or 0")
            found[name] = _WORDS[text.strip().lower()]
        else:
            found[name] = text
    return found
