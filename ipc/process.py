"""What every process sets up for itself: how its log lines look. One line per event, on stderr, with its name."""
from __future__ import annotations

import logging
import sys

PACKAGES = ("ipc", "engine_core", "worker", "frontend", "bench")


def configure_logging(name: str, level: str) -> None:
    """The level is that of our own packages. Libraries say what is wrong and no more: numba alone would write thousands
    of lines at debug."""
    logging.basicConfig(stream=sys.stderr, level=max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]),
                        force=True, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
