"""Makes Triton's interpreter right for bfloat16 and float8, so that kernels can be proven on a CPU.

The interpreter keeps bfloat16 as uint16 and float8 as uint8 and computes on those integers: errors of 1e9, no
exception. Its conversions truncate where the hardware rounds to nearest even, and its maximum keeps a NaN where the
hardware takes the number. `install` replaces the conversions by torch's, lets tl.dot see real numbers, takes the
hardware's maximum, and turns every other arithmetic on narrow values into an error: kernels cast to float32 first. It
changes nothing when kernels are compiled.
It does not know any kernel. It touches internals of Triton, therefore `check_bf16_dot` proves the result.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_NARROW: dict[Any, torch.dtype] = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS: dict[torch.dtype, np.dtype[Any]] = {torch.bfloat16: np.dtype("u2"), torch.float8_e4m3fn: np.dtype("u1"),
                                           torch.float8_e5m2: np.dtype("u1")}
_SIGNED_BITS = {**_BITS, torch.bfloat16: np.dtype("i2")}  # torch has no full uint16
_installed = False


def is_interpreted() -> bool:
    """Kernels run on CPU tensors: TRITON_INTERPRET was set when Triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def install_if_interpreted() -> None:
    """Repair the interpreter if it is on; once."""
    global _installed
    if is_interpreted() and not _installed:
        _install()
        _installed = True


def _to_float32(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    bits = torch.from_numpy(np.ascontiguousarray(data).view(_SIGNED_BITS[dtype]))
    return np.asarray(bits.view(dtype).float().numpy()).reshape(data.shape)


def _to_bits(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(dtype)
    bits: np.ndarray = rounded.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy()
    return bits.view(_BITS[dtype]).reshape(data.shape)


def _install() -> None:
    """Replace the builder's conversions, dot and arithmetic."""
    import triton.runtime.interpreter as interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle: Callable[..., Any] = interpreter.TensorHandle
    old_dot, old_binary, old_unary = builder.create_dot, builder.binary_op, builder.unary_op

    def widen(value: Any) -> Any:
        narrow = _NARROW.get(value.dtype.scalar)
        return value if narrow is None else handle(_to_float32(value.data, narrow), tl.float32)

    def convert(value: Any, target: Any) -> Any:
        wide, narrow = widen(value), _NARROW.get(target.scalar)
        if narrow is None:
            return handle(wide.data.astype(interpreter._get_np_dtype(target)), target.scalar)
        return handle(_to_bits(wide.data, narrow), target.scalar)

    def refuse_narrow(*values: Any) -> None:
        for value in values:
            if value.dtype.scalar in _NARROW:
                raise TypeError(f"arithmetic on {value.dtype} in the interpreter: cast to tl.float32 first")

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return old_dot(self, widen(a), widen(b), d, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        refuse_narrow(lhs, rhs)
        return old_binary(self, lhs, rhs, op)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        refuse_narrow(arg)
        return old_unary(self, arg, op)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    builder.create_maxnumf = lambda self, lhs, rhs: binary_op(self, lhs, rhs, np.fmax)
    builder.create_minnumf = lambda self, lhs, rhs: binary_op(self, lhs, rhs, np.fmin)
    builder.cast_impl = lambda self, value, target: convert(value, target)
    builder.create_fp_to_fp = lambda self, value, target, rounding: convert(value, target)


@triton.jit
def _square_dot(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    at = index[:, None] * SIZE + index[None, :]
    product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, product.to(tl.bfloat16))


def check_bf16_dot() -> None:
    """A bf16 matrix product must equal torch's. Raises RuntimeError on a Triton whose internals have changed."""
    a, b = torch.randn((2, 16, 16), generator=torch.Generator().manual_seed(0)).bfloat16().unbind(0)
    out: Tensor = torch.empty_like(a)
    _square_dot[(1,)](a, b, out, SIZE=16)
    if not torch.allclose(out.float(), a.float() @ b.float(), rtol=1e-2, atol=1e-2):
        raise RuntimeError(f"Triton {triton.__version__}: the interpreter computes a wrong bf16 product; "
                           "worker/kernels/interpreter.py does not fit this version")
