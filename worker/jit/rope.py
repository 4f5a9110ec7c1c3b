"""Head norm, rotation and the write into the KV pool, in one pass over a row of the fused projection.

The pool's layout is the attention kernel's own (worker/attention/jit_layout.py). A row's queries stay where they are,
rotated in place.
"""
from __future__ import annotations

import math

from numba import types

from worker.jit import step as st
from worker.jit.kv_codes import key_place, to_bf16, write_codes
from worker.jit.vector import (add, device, get_f32, get_i64, load_f32, mul, muladd, set_f32, set_u16,
                               splat, store_bf16, store_f32, sub, sum_lanes)

_f32 = types.float32

# Q, K and V are addresses of row 0's heads; NORM 0: no head norm; ROTATE 0: write only, Q is not read.
Q, K, V, LD_Q, LD_KV, NORM, EPS_BITS, ROTATE, K_POOL, V_POOL, K_SCALES, V_SCALES = range(8, 20)
POOL_FIELDS = (K_POOL, V_POOL, K_SCALES, V_SCALES)   # of the tensors of a cache, in order


@device
def rope_row(op, step, n, eps):  # type: ignore[no-untyped-def]
    """Token n of the step. A slot of -1 is padding and goes to the pool's last slot."""
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    k, v = get_i64(op, K) + n * get_i64(op, LD_KV), get_i64(op, V) + n * get_i64(op, LD_KV)
    if get_i64(op, ROTATE) != 0:
        q, norm = get_i64(op, Q) + n * get_i64(op, LD_Q), get_i64(op, NORM)
        at = get_i64(get_i64(step, st.POSITIONS), n) * (dim // 2) * 4
        cos, sin = get_i64(step, st.COS) + at, get_i64(step, st.SIN) + at
        for h in range(heads + kv_heads):
            x = q + h * dim * 4 if h < heads else k + (h - heads) * dim * 4
            if norm != 0:
                _norm_head(x, norm + h * dim * 4, dim, eps)
            _rotate(x, cos, sin, dim)
    slot = get_i64(get_i64(step, st.SLOTS), n)
    if slot < 0:
        slot = get_i64(step, st.NUM_SLOTS) - 1
    size = get_i64(step, st.BLOCK_SIZE)
    block, offset, padded, kind = slot // size, slot % size, (size + 15) // 16 * 16, get_i64(step, st.POOL_KIND)
    if kind == st.POOL_F32 or kind == st.POOL_BF16:
        write_token(get_i64(op, K_POOL), get_i64(op, V_POOL), k, v, block, offset, padded, kv_heads, dim, kind)
        return
    padded_dim = (dim + 15) // 16 * 16
    key_bytes, key_item = key_place(kind, dim, 1)
    for h in range(kv_heads):
        head = block * kv_heads + h
        scale_at = (head * padded + offset) * 2
        write_codes(k + h * dim * 4, dim, get_i64(op, K_POOL) + head * key_bytes * padded + offset * key_item,
                    padded * key_item, get_i64(op, K_SCALES) + scale_at, kind)
        write_codes(v + h * dim * 4, dim, get_i64(op, V_POOL) + (head * padded + offset) * padded_dim, 1,
                    get_i64(op, V_SCALES) + scale_at, kind)


@device
def _norm_head(x, weight, dim, eps):  # type: ignore[no-untyped-def]
    if dim % 16 == 0:
        total = splat(_f32(0.0))
        for i in range(0, dim * 4, 64):
            value = load_f32(x + i)
            total = muladd(value, value, total)
        factor = splat(_f32(1.0) / _f32(math.sqrt(sum_lanes(total) / _f32(dim) + eps)))
        for i in range(0, dim * 4, 64):
            store_f32(x + i, mul(mul(load_f32(x + i), factor), load_f32(weight + i)))
        return
    squares = _f32(0.0)
    for i in range(dim):
        squares += get_f32(x, i) * get_f32(x, i)
    scalar = _f32(1.0) / _f32(math.sqrt(squares / _f32(dim) + eps))
    for i in range(dim):
        set_f32(x, i, get_f32(x, i) * scalar * get_f32(weight, i))


@device
def _rotate(x, cos, sin, dim):  # type: ignore[no-untyped-def]
    """The pairs (i, i + D/2): (a cos - b sin, b cos + a sin)."""
    half = dim // 2
    if half % 16 == 0:
        for i in range(0, half * 4, 64):
            a, b, c, s = load_f32(x + i), load_f32(x + half * 4 + i), load_f32(cos + i), load_f32(sin + i)
            store_f32(x + i, sub(mul(a, c), mul(b, s)))
            store_f32(x + half * 4 + i, add(mul(b, c), mul(a, s)))
        return
    for i in range(half):
        first, second = get_f32(x, i), get_f32(x, half + i)
        c1, s1 = get_f32(cos, i), get_f32(sin, i)
        set_f32(x, i, first * c1 - second * s1)
        set_f32(x, half + i, second * c1 + first * s1)


@device
def write_token(k_pool, v_pool, k, v, block, offset, padded_size, kv_heads, dim, kind):  # type: ignore[no-untyped-def]
    """A key is a column of its block, so that attention reads one dimension of sixteen keys with one load."""
    padded_dim = (dim + 15) // 16 * 16
    for h in range(kv_heads):
        key_at = ((block * kv_heads + h) * dim) * padded_size + offset
        value_at = ((block * kv_heads + h) * padded_size + offset) * padded_dim
        if kind == st.POOL_F32:
            for i in range(dim):
                set_f32(k_pool, key_at + i * padded_size, get_f32(k, h * dim + i))
            for i in range(dim):
                set_f32(v_pool, value_at + i, get_f32(v, h * dim + i))
        else:
            for i in range(dim):
                set_u16(k_pool, key_at + i * padded_size, to_bf16(get_f32(k, h * dim + i)))
            whole = dim // 16 * 16
            for i in range(0, whole, 16):
                store_bf16(v_pool + (value_at + i) * 2, load_f32(v + (h * dim + i) * 4))
            for i in range(whole, dim):
                set_u16(v_pool, value_at + i, to_bf16(get_f32(v, h * dim + i)))
