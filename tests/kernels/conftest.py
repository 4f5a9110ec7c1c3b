"""The interpreted tests run in a process of their own, since Triton decides at import whether it interprets."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
