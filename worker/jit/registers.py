"""Two fences for the compiler, which otherwise computes many sums at once and runs out of registers. Free of charge."""
from __future__ import annotations

from typing import Any

from llvmlite import ir


def keep(b: Any, sums: list[list[Any]]) -> list[list[Any]]:
    """The same vectors, in registers: computed up to here before what follows is begun; so is what touches memory."""
    flat = [value for row in sums for value in row]
    kinds = [value.type for value in flat]
    names = ",".join(["=x"] * len(flat) + [str(i) for i in range(len(flat))] + ["~{memory}"])
    result = ir.LiteralStructType(kinds) if len(flat) > 1 else kinds[0]
    kept = b.asm(ir.FunctionType(result, kinds), "", names, flat, side_effect=True)
    values = iter([b.extract_value(kept, i) for i in range(len(flat))] if len(flat) > 1 else [kept])
    return [[next(values) for _ in row] for row in sums]


def opaque(b: Any, address: Any) -> Any:
    """A pointer of which the compiler does not know what it points at: what is stored there is read back."""
    return b.asm(ir.FunctionType(address.type, [address.type]), "", "=r,0", [address], side_effect=True)
