"""Our top-level names are common words, so a folder of the user's may hide one of ours. Found here, and named."""
from __future__ import annotations

import importlib.util
import os

NAMES = ("ipc", "frontend", "engine_core", "worker")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def check_not_shadowed() -> None:
    """Raises ImportError when one of our packages would be imported from somebody else's folder."""
    for name in NAMES:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not any(os.path.realpath(place) == os.path.realpath(os.path.join(ROOT, name)) for place in places):
            where = (spec.origin or (places[0] if places else "a namespace")) if spec is not None else "nowhere"
            raise ImportError(f"package {name!r} is found at {where}, which hides {os.path.join(ROOT, name)}; rename "
                              f"that folder, or run python -P with {ROOT} first on PYTHONPATH")
