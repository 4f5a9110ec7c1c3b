"""What every process sets up for itself: how its log lines look. One line per event, on stderr, with its name."""
from __future__ import annotations

import logging
import sys


def configure_logging(name: str, level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=level.upper(), force=True,
                        format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")
