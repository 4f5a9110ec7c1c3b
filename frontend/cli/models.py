"""`launch.py models`: the short names, what each would need, and what is already on this machine, and where.

Looks at folders only: no network, no model is opened. Sizes are what the files take on disk.
"""
from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple

from frontend.cli.common import run_command
from frontend.cli.source import ServerSource
from ipc.aliases import ALIASES, DEMO_ALIAS, alias_names
from ipc.capacity import size_text, weight_count
from ipc.errors import ConfigError
from ipc.model_config import SUPPORTED_ARCHITECTURES, from_hf_config
from ipc.model_source import DEFAULT_CACHE_DIR, DEMO_MEMBER, DEMO_WHEEL, missing_files
from ipc.option_help import OptionParser


class Cached(NamedTuple):
    """A model on this machine."""
    path: str
    num_bytes: int
    missing: str                                 # what it lacks, in words; "": it can be served


def hub_cache() -> str:
    """The hub library's own folder, as it would use it."""
    from huggingface_hub import constants
    return str(constants.HF_HUB_CACHE)


def folder_bytes(path: str) -> int:
    """What the files below take; a file that is linked to several times counts once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.stat(os.path.join(folder, name))
            except OSError:
                continue
            seen[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(seen.values())


def scan_hub(cache: str) -> dict[str, Cached]:
    """hub id -> its newest snapshot, of every model in the hub cache that has a config.json."""
    found: dict[str, Cached] = {}
    for entry in sorted(os.listdir(cache)) if os.path.isdir(cache) else []:
        if not entry.startswith("models--"):
            continue
        snapshots = os.path.join(cache, entry, "snapshots")
        paths = [os.path.join(snapshots, name) for name in os.listdir(snapshots)] if os.path.isdir(snapshots) else []
        paths = [path for path in paths if os.path.isfile(os.path.join(path, "config.json"))]
        if paths:
            path = max(paths, key=os.path.getmtime)
            try:
                missing = missing_files(path)
            except ConfigError as error:
                missing = str(error)
            found[entry.removeprefix("models--").replace("--", "/")] = Cached(path, folder_bytes(path), missing)
    return found


def is_supported(path: str) -> bool:
    """Whether its config.json names an architecture that the worker runs."""
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            names = json.load(file).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(name in SUPPORTED_ARCHITECTURES for name in names)


def find_demo(cache_dir: str | None) -> Cached | None:
    """The embedded default model, which has a cache of its own."""
    folder = os.path.join(os.path.expanduser(cache_dir or DEFAULT_CACHE_DIR), DEMO_WHEEL.split("-py3")[0])
    path = os.path.join(folder, os.path.basename(DEMO_MEMBER))
    return Cached(path, os.path.getsize(path), "") if os.path.isfile(path) else None


def list_models(cache: str, cache_dir: str | None) -> list[dict[str, Any]]:
    """One row for each alias, then for each other model in the hub cache that could be served."""
    hub = scan_hub(cache)
    rows = []
    for name in alias_names():
        alias = ALIASES[name]
        config = from_hf_config(alias.hf_config, name)
        cached = hub.pop(alias.hub_id, None)
        if name == DEMO_ALIAS:
            cached = find_demo(cache_dir) or cached
        rows.append({"name": name, "hub_id": alias.hub_id, "parameters": weight_count(config),
                     "max_model_len": config.max_position_embeddings, "is_gated": alias.is_gated, **_place(cached)})
    rows += [{"name": hub_id, "hub_id": hub_id, "parameters": None, "max_model_len": None, "is_gated": False,
              **_place(cached)} for hub_id, cached in hub.items() if is_supported(cached.path)]
    return rows


def _place(cached: Cached | None) -> dict[str, Any]:
    return {"path": cached.path if cached else None, "bytes": cached.num_bytes if cached else None,
            "missing": cached.missing if cached else None}


def print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["name"]) for row in rows) + 1
    print(f"{'name':<{width}} {'parameters':>10} {'as bfloat16':>11} {'context':>8}  on this machine")
    for row in rows:
        count, length = row["parameters"], row["max_model_len"]
        weights = size_text(2 * count) if count else ""
        place = f"{size_text(row['bytes'])} in {row['path']}" if row["path"] else ("licence and HF_TOKEN needed"
                                                                                   if row["is_gated"] else "-")
        if row["missing"]:
            place += f" (incomplete: {row['missing']})"
        parameters = "" if not count else f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
        context = f"{length // 1024}k" if length else ""
        print(f"{row['name']:<{width}} {parameters:>10} {weights:>11} {context:>8}  {place}")


def main(argv: list[str]) -> int:
    parser = OptionParser(
        prog="launch.py models", description="List short names and what is cached. Any folder, "
        ".gguf file or hub id of a supported family works too.")
    parser.add_argument("--url", help="list what this server serves instead")
    parser.add_argument("--api-key", default="", metavar="KEY", help="of that server")
    parser.add_argument("--cached", action="store_true", help="only what is on this machine")
    parser.add_argument("--download-dir", metavar="FOLDER", help=f"as when serving (default: {DEFAULT_CACHE_DIR})")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    args = parser.parse_args(argv)

    def command() -> int:
        if args.url:
            names = ServerSource(args.url, api_key=args.api_key).models
            print(json.dumps(names) if args.json else "\n".join(names))
            return 0
        rows = list_models(hub_cache(), args.download_dir)
        if args.cached:
            rows = [row for row in rows if row["path"]]
        if args.json:
            print(json.dumps(rows))
        elif rows:
            print_table(rows)
            print(f"\nhub cache: {hub_cache()}")
        else:
            print("nothing is on this machine yet; python launch.py demo fetches the smallest model")
        return 0
    return run_command("models", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
