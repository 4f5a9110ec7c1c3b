"""The set-up of launch.py: see whether this Python has what is needed, else make and fill .venv and go on in there.

Standard library only, and imports nothing of the project: it runs before anything is installed. Rejected: installing
the project itself into .venv; its packages would then shadow the user's own in any program run there.
"""
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "threefold-setup.json")
CONSTRAINTS = os.path.join(ROOT, "constraints-ci.txt")
STARTED = "THREEFOLD_STARTED"                # time.monotonic() of the user's command, kept over the change of Python
IN_VENV = "THREEFOLD_IN_VENV"                # the change was made: a second one would never end
LEAST_FREE_MB = 1000
# MB: (to download, on disk). With an index whose plain torch is the build for CUDA, "cpu" costs as much as "cuda".
SIZES = {"cpu": (200, 900), "cuda": (2500, 5500), "base": (90, 350), "test": (400, 1700), "triton": (190, 900)}


class SetupError(Exception):
    """One line for the user."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _project() -> dict[str, Any]:
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def requirements(extras: Iterable[str]) -> list[str]:
    """The lines of pyproject.toml: what is needed always, then what these extras add."""
    project = _project()
    known = project["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise SetupError(f"no extra {extra!r}; known are {', '.join(known)}")
    return project["dependencies"] + [line for extra in extras for line in known[extra]]


def missing(lines: Iterable[str]) -> list[str]:
    """Those that this interpreter lacks or has in a version out of range, each as a short text."""
    gaps = []
    for line in lines:
        name, ranges = _split(line)
        try:
            found = version(name)
            if not all(_satisfies(found, clause) for clause in ranges.split(",") if clause):
                gaps.append(f"{name} {found} (needs {ranges})")
        except PackageNotFoundError:
            gaps.append(name)
    return gaps


def _split(line: str) -> tuple[str, str]:
    """("torch", ">=2.9,<2.15")"""
    name = re.split(r"[<>=!~ ]", line)[0]
    return name, line[len(name):].strip()


def _satisfies(found: str, clause: str) -> bool:
    operator = clause.strip().rstrip("0123456789.")
    a, b = ([int(n) for n in re.findall(r"\d+", text.split("+")[0])[:4]] for text in (found, clause))
    a, b = (x + [0] * (4 - len(x)) for x in (a, b))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[operator]


def _fingerprint() -> str:
    """Changes when what must be installed does."""
    project = _project()
    text = json.dumps([project["dependencies"], project["optional-dependencies"], _pins()])
    return hashlib.sha256(text.encode()).hexdigest()


def _stamp() -> dict[str, Any]:
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
        return stamp if stamp["hash"] == _fingerprint() and os.access(VENV_PYTHON, os.X_OK) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def ensure(extras: Sequence[str] = (), torch: str = "", may_install: bool = True) -> None:
    """Return if this Python can run the command; else go on in .venv's, made or completed first if that is allowed."""
    is_venv = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    gaps, stamp = missing(requirements(extras)), _stamp()
    is_other_torch = torch not in ("", stamp.get("torch"))
    if not gaps and (is_venv or not torch) and not is_other_torch:
        return
    is_done = bool(stamp) and set(extras) <= set(stamp["extras"]) and not is_other_torch and not (is_venv and gaps)
    if not is_done:
        if not may_install:
            raise SetupError(f"{sys.executable} lacks {', '.join(gaps)}; run: python launch.py setup")
        install(sorted({*extras, *stamp.get("extras", ())}), torch or stamp.get("torch") or _default_torch(),
                stamp.get("torch", ""))
    if is_venv and missing(requirements(extras)):
        raise SetupError(f"{VENV} is incomplete although pip said it was done; delete it and try again")
    if not is_venv:
        if os.environ.get(IN_VENV) == VENV:
            raise SetupError(f"{VENV_PYTHON} is not a Python of {VENV}; delete that folder and try again")
        os.environ[IN_VENV] = VENV
        os.execv(VENV_PYTHON, [VENV_PYTHON, os.path.join(ROOT, "launch.py"), *sys.argv[1:]])


def has_nvidia_driver() -> bool:
    """What decides between the defaults of a GPU and of a CPU before torch is there to ask."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def _default_torch() -> str:
    """The CUDA build where an NVIDIA driver is loaded."""
    return "cuda" if has_nvidia_driver() else "cpu"


def install(extras: list[str], torch: str, torch_before: str) -> None:
    """Make .venv and fill it. torch first and alone: with it, another package's open range could pull another build."""
    parts = ["cpu" if torch not in SIZES else torch, "base", *extras]
    download, disk = (sum(SIZES[part][i] for part in parts if part in SIZES) for i in (0, 1))
    _check_place(disk)
    say(f"set-up in {VENV}: about {download} MB to download, {disk} MB on disk (torch: {torch}; other builds: --torch)")
    if not os.access(VENV_PYTHON, os.X_OK):
        timed("make .venv", [sys.executable, "-m", "venv", "--clear", VENV])
    pins = _pins()
    torch_line = next(line for line in requirements(()) if _split(line)[0] == "torch")
    if torch == "cpu":
        torch_line = "torch" + pins.get("torch", _split(torch_line)[1])
    source = [] if torch in ("cpu", "cuda") else ["--index-url", torch]
    force = ["--force-reinstall"] if torch_before not in ("", torch) else []
    pip("install torch", [*force, *source, torch_line])
    listing = subprocess.check_output([VENV_PYTHON, "-P", "-m", "pip", "list", "--format", "json"], cwd=ROOT)
    # What torch brought stays: a build for CUDA comes with a triton of its own, which the pins of CI would contradict.
    pins.update({package["name"]: "==" + package["version"] for package in json.loads(listing)
                 if package["name"] in ("torch", "triton")})
    constraints = os.path.join(VENV, "constraints.txt")
    with open(constraints, "w") as file:
        file.writelines(f"{name}{spec}\n" for name, spec in pins.items())
    pip("install the rest", ["-c", constraints, *requirements(extras)])
    with open(STAMP, "w") as file:
        json.dump({"hash": _fingerprint(), "extras": extras, "torch": torch}, file)


def _check_place(disk: int) -> None:
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"this Python has no {module} module; on Debian and Ubuntu: apt install python3-venv")
    if not os.access(VENV if os.path.isdir(VENV) else ROOT, os.W_OK):
        raise SetupError(f"cannot write in {ROOT}, where .venv would go; copy the project to a folder of yours")
    free = shutil.disk_usage(ROOT).free >> 20
    needed = LEAST_FREE_MB if os.path.exists(STAMP) else max(LEAST_FREE_MB, disk)
    if free < needed:
        raise SetupError(f"{free} MB are free in {ROOT}, {needed} MB are needed; free some, or move the project")


def _pins() -> dict[str, str]:
    """{"torch": "==2.13.0", ...} of constraints-ci.txt."""
    with open(CONSTRAINTS) as file:
        return dict(map(_split, filter(None, (line.split("#")[0].strip() for line in file))))


def pip(title: str, arguments: list[str]) -> None:
    quiet = [] if sys.stderr.isatty() else ["-qq"]
    timed(title, [VENV_PYTHON, "-P", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *quiet,
                  *arguments])


def timed(title: str, command: list[str]) -> None:
    """Run one step of the set-up and name its seconds."""
    began = time.monotonic()
    say(f"{title} ...")
    if subprocess.call(command, stdin=subprocess.DEVNULL, stdout=2, cwd=ROOT) != 0:
        raise SetupError(f"{title} failed (see above); the command was: {' '.join(command)}")
    say(f"{title}: {time.monotonic() - began:.1f} s")
