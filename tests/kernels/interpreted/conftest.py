"""Makes the interpreter right for bf16 before any kernel runs."""

from __future__ import annotations

import pytest

from worker.kernels.interpreter import check_bf16_dot, install_if_interpreted, is_interpreted


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    if not is_interpreted():
        raise RuntimeError("set TRITON_INTERPRET=1 before Python starts; tests/kernels/test_interpreted.py does")
    install_if_interpreted()
    check_bf16_dot()
