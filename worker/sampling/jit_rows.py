"""One row of logits at a time, compiled: arg-max, draw, log-probabilities. The CPU form of filters.py and noise.py.

A row of 150,000 logits fits in a core's cache, so a row is read from memory once, however many passes it takes. Passes
are plain loops that LLVM turns into vector instructions. Thresholds are found without a sort: the largest of every
CHUNK logits tells which chunks can matter, a histogram by value narrows what is left. All of a row's numbers come from
that row alone, in an order that depends on nothing else: a row gives the same token in any batch and by any thread.
Does not know requests, masks or penalties. Threads: jit_threads.py.
"""
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.extending import intrinsic

from worker.jit import features

config.CACHE_DIR = str(features.cache_folder())  # type: ignore[attr-defined]

CHUNK = 256
AHEAD = 2048                                    # logits; what is fetched while a chunk is read
BINS = 512
FEW = 32                                        # sorted outright
LOG2E = 1.4426950408889634
SMALLEST_T = 1e-30                              # a float32 that may divide; below it only the maximum has any weight
_MINUS_INF = np.float32(-np.inf)
_F0, _F1 = np.float32(0.0), np.float32(1.0)
_LOWEST = np.finfo(np.float32).min
_ROUND = np.float32(12582912.0)                 # 1.5 * 2**23: adding it rounds to the nearest integer
_ROUND_BITS = np.int32(0x4B400000)
_SMALLEST_EXPONENT = np.float32(-126.0)
_HALF = np.float32(0.5)
# 2**r on [-0.5, 0.5], least maximum relative error (2e-8 before rounding).
_C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(c) for c in (
    0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
    0.00015403530393381606))


@intrinsic
def _bits(typingctx, value):  # type: ignore[no-untyped-def]
    """float32 -> int32 with the same bits."""
    return types.int32(types.float32), lambda _, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(typingctx, value):  # type: ignore[no-untyped-def]
    """int32 -> float32 with the same bits."""
    return types.float32(types.int32), lambda _, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of array[index]; any index is harmless."""
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.gep(data, [args[1]])
        byte, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(
            ir.VoidType(), [byte, i32, i32, i32]))
        builder.call(function, [builder.bitcast(address, byte), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()
    return types.void(array, types.intp), generate


_device = njit(nogil=True, error_model="numpy", inline="never")
_inline = njit(nogil=True, error_model="numpy")
_sums = njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})  # the order of a sum's terms may change
_entry = njit(nogil=True, error_model="numpy", cache=True)


@_inline
def _key(value):  # type: ignore[no-untyped-def]
    """An int32 that orders as floats do; NaNs lie beyond both infinities."""
    bits = _bits(value)
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


_KEY_INF, _KEY_MINUS_INF = np.int32(0x7F800000), np.int32(-2139095041)


@_inline
def _exp2(t):  # type: ignore[no-untyped-def]
    """2**t for t <= 0, 0 below 2**-126."""
    clamped = t if t > _SMALLEST_EXPONENT else _SMALLEST_EXPONENT
    rounded = clamped + _ROUND
    r = clamped - (rounded - _ROUND)
    p = _F1 + r * (_C1 + r * (_C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))))
    exponent = np.int32(np.int32(_bits(rounded) - _ROUND_BITS) << np.int32(23))
    scaled = _float(np.int32(_bits(p) + exponent))
    return scaled if t > _SMALLEST_EXPONENT else _F0


@_inline
def _chunk_range(part):  # type: ignore[no-untyped-def]
    """(largest, smallest) key. Loops run over slices from 0: an index that may be negative costs a test per element."""
    high, low = np.int32(-2147483648), np.int32(2147483647)
    for i in range(len(part)):
        key = _key(part[i])
        high = key if key > high else high
        low = key if key < low else low
    return high, low


@_device
def _scan(x, width, chunk_max):  # type: ignore[no-untyped-def]
    """Fill chunk_max; (chunk of the first largest, largest). NaN anywhere: the largest is NaN."""
    best, chunk, low = np.int32(-2147483648), 0, np.int32(2147483647)
    for c in range((width + CHUNK - 1) // CHUNK):
        for line in range(CHUNK // 16):         # the short loops hide the stream from the hardware's prefetcher
            _prefetch(x, c * CHUNK + AHEAD + 16 * line)
        high, small = _chunk_range(x[c * CHUNK:min(width, c * CHUNK + CHUNK)])
        chunk_max[c] = _float(_key(_float(high)))
        low = min(low, small)
        if high > best:
            best, chunk = high, c
    if low < _KEY_MINUS_INF or best > _KEY_INF:
        return 0, np.float32(np.nan)
    return chunk, _float(_key(_float(best)))


@_device
def _first(x, width, chunk, value):  # type: ignore[no-untyped-def]
    for i in range(chunk * CHUNK, min(width, chunk * CHUNK + CHUNK)):
        if x[i] == value:
            return i
    return 0


@_device
def _weights(part, largest, scale, limit, out):  # type: ignore[no-untyped-def]
    """out[i]: 2**((part[i] - largest) * scale), 0 below the limit."""
    for i in range(len(part)):
        v = part[i]
        w = _exp2((v - largest) * scale)
        out[i] = w if v >= limit else _F0


@_sums
def _total(part):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(len(part)):
        total += part[i]
    return total


@_device
def _chunk_sums(x, width, chunk_max, largest, scale, limit, tile, sums):  # type: ignore[no-untyped-def]
    """Fill sums with each chunk's weight; their total. A chunk whose largest is below the limit is not read."""
    total = 0.0
    for c in range((width + CHUNK - 1) // CHUNK):
        part = 0.0
        if chunk_max[c] >= limit:
            begin, end = c * CHUNK, min(width, c * CHUNK + CHUNK)
            _weights(x[begin:end], largest, scale, limit, tile)
            part = np.float64(_total(tile[:end - begin]))
        sums[c] = part
        total += part
    return total


@_device
def _collect(x, width, chunk_max, limit, found):  # type: ignore[no-untyped-def]
    """Copy the logits >= limit, which is finite; their number."""
    n = 0
    for c in range((width + CHUNK - 1) // CHUNK):
        if chunk_max[c] >= limit:
            part = x[c * CHUNK:min(width, c * CHUNK + CHUNK)]
            for i in range(len(part)):
                v = part[i]
                found[n] = v
                n += v >= limit
    return n


@_device
def _sort_few(values, weights, n):  # type: ignore[no-untyped-def]
    """Falling order, in place."""
    for i in range(1, n):
        v, w = values[i], weights[i]
        j = i
        while j > 0 and values[j - 1] < v:
            values[j], weights[j] = values[j - 1], weights[j - 1]
            j -= 1
        values[j], weights[j] = v, w


@_inline
def _bin(value, low, per_value):  # type: ignore[no-untyped-def]
    """Rounding keeps order, so a larger value is never in a lower bin."""
    return min(np.int64((value - low) * per_value), BINS - 1)


@_device
def _cut(values, weights, n, low, high, target, histogram):  # type: ignore[no-untyped-def]
    """The largest t for which the weights of all values >= t reach the target; the smallest value if none does.
    All values lie between low and high. Overwrites values and weights."""
    above, is_tight = 0.0, low <= _LOWEST       # without a real bound, look for one
    while True:
        if is_tight or n <= FEW:
            low, high = values[0], values[0]
            for i in range(1, n):
                v = values[i]
                low = v if v < low else low
                high = v if v > high else high
        is_tight = True
        if low == high:
            return low
        if n <= FEW:
            _sort_few(values, weights, n)
            for i in range(n):
                above += weights[i]
                if above >= target:
                    return values[i]
            return values[n - 1]
        per_value = np.float32((BINS - 1) / max(np.float64(high) - np.float64(low), 1e-30))
        histogram[:BINS] = 0.0
        for i in range(n):
            histogram[_bin(values[i], low, per_value)] += weights[i]
        bin_ = BINS - 1
        while bin_ > 0 and above + histogram[bin_] < target:
            above += histogram[bin_]
            bin_ -= 1
        kept = 0
        for i in range(n):
            v, w = values[i], weights[i]
            values[kept], weights[kept] = v, w
            kept += _bin(v, low, per_value) == bin_
        if kept == 0:                           # the sums fell short of the target by rounding
            return low
        n = kept


@_device
def _kth_largest(x, width, chunk_max, largest, k, found, ones, histogram):  # type: ignore[no-untyped-def]
    """The k-th largest logit, or the smallest finite one when fewer are finite."""
    num_chunks = (width + CHUNK - 1) // CHUNK
    limit = np.float32(_LOWEST)
    if k <= num_chunks:
        # k chunks have a logit this large, so the k-th largest logit is no smaller.
        n = 0
        for c in range(num_chunks):
            found[n] = chunk_max[c]
            n += chunk_max[c] >= limit
        ones[:n] = 1.0
        if n > k:
            limit = _cut(found, ones, n, limit, largest, np.float64(k), histogram)
    n = _collect(x, width, chunk_max, limit, found)
    ones[:n] = 1.0
    return _cut(found, ones, n, limit, largest, np.float64(k), histogram)


@_device
def _limit(x, width, chunk_max, largest, temperature, scale, top_k, top_p, min_p, tile, sums, found, mass,  # type: ignore[no-untyped-def]
           histogram):
    """The smallest logit that may be drawn; -inf: all. min_p, then top-k, then top-p over what those left."""
    limit = np.float32(-np.inf)
    if min_p > 0.0:
        limit = np.float32(largest + temperature * np.log(min_p))
    if 0 < top_k < width:
        limit = max(limit, _kth_largest(x, width, chunk_max, largest, top_k, found, mass, histogram))
    if top_p < 1.0:
        total = 0.0
        lowest = np.float32(_LOWEST)
        if limit < lowest:
            total = _chunk_sums(x, width, chunk_max, largest, scale, limit, tile, sums)
            # All tokens lighter than this weigh less than 1 - top_p together: the threshold is not among them.
            share = (1.0 - top_p) * total / width
            if share > 1e-37:
                bound = largest + (np.log2(share) - 1e-3) / scale - 1e-6 * abs(largest)
                lowest = np.float32(max(np.float64(lowest), bound))
        else:
            lowest = limit
        n = _collect(x, width, chunk_max, lowest, found)
        _weights(found[:n], largest, scale, lowest, mass)
        if total == 0.0:
            for begin in range(0, n, CHUNK):
                total += _total(mass[begin:min(n, begin + CHUNK)])
        limit = max(limit, _cut(found, mass, n, lowest, largest, top_p * total, histogram))
    return limit


@_device
def _draw(x, width, chunk_max, largest, scale, limit, noise, tile, sums):  # type: ignore[no-untyped-def]
    """The first token, by id, whose cumulative weight exceeds noise * total."""
    target = noise * _chunk_sums(x, width, chunk_max, largest, scale, limit, tile, sums)
    chunk, before, last = -1, 0.0, 0
    for c in range((width + CHUNK - 1) // CHUNK):
        if sums[c] > 0.0:
            last = c
            if before + sums[c] > target:
                chunk = c
                break
            before += sums[c]
    if chunk < 0:                               # cannot be: target < total, summed in the same order
        chunk = last
    begin, end = chunk * CHUNK, min(width, chunk * CHUNK + CHUNK)
    _weights(x[begin:end], largest, scale, limit, tile)
    token, cumulative = begin, before
    for i in range(end - begin):
        if tile[i] > _F0:
            token = begin + i
            cumulative += tile[i]
            if cumulative > target:
                break
    return token


@_device
def _uniform(seed, child, index):  # type: ignore[no-untyped-def]
    """Lane 0 of ipc.counter_rng.uniform, bit for bit: Philox4x32-10."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    place, choice = np.uint64(index), np.uint64(child)
    c0, c1, c2, c3 = place & mask, place >> shift, choice & mask, np.uint64(0)
    k0, k1 = seed & mask, seed >> shift
    for i in range(10):
        if i:
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & mask, (first >> shift) ^ c3 ^ k1, first & mask
    return np.float64(np.int64((c0 >> np.uint64(9)) * np.uint64(2) + np.uint64(1))) * 2.0 ** -24


@_entry
def greedy_rows(x, stride, width, begin, end, scratch, tokens, bad, empty):  # type: ignore[no-untyped-def]
    """The arg-max of rows begin to end, as in sample_rows."""
    for r in range(begin, end):
        row = x[r * stride:r * stride + width]
        chunk, top = _scan(row, width, scratch)
        bad[r], empty[r] = not np.isfinite(top), top == _MINUS_INF
        tokens[r] = 0 if bad[r] else _first(row, width, chunk, top)


@_entry
def sample_rows(x, stride, width, begin, end, temperature, top_k, top_p, min_p, seed, child, index, scratch, histogram,  # type: ignore[no-untyped-def]
                tokens, bad, empty):
    """tokens[r], bad[r], empty[r] for rows begin to end; row r is x[r * stride:][:width], float32. Temperature 0: the
    arg-max. A row whose largest is not finite is bad and gets token 0; if it is -inf, the row is empty.
    scratch float32 [>= 3 * V + 2 * CHUNK], histogram float64 [>= BINS + V / CHUNK + 1]."""
    num_chunks = (width + CHUNK - 1) // CHUNK
    chunk_max, tile = scratch[:num_chunks], scratch[num_chunks:num_chunks + CHUNK]
    found = scratch[num_chunks + CHUNK:num_chunks + CHUNK + width + 1]
    mass = scratch[num_chunks + CHUNK + width + 1:]
    sums = histogram[BINS:]
    for r in range(begin, end):
        row = x[r * stride:r * stride + width]
        chunk, top = _scan(row, width, chunk_max)
        bad[r], empty[r] = not np.isfinite(top), top == _MINUS_INF
        tokens[r] = 0
        if bad[r]:
            continue
        if temperature[r] <= 0.0:
            tokens[r] = _first(row, width, chunk, top)
            continue
        heat = np.float64(temperature[r])
        scale = np.float32(LOG2E / max(heat, SMALLEST_T))
        limit = _limit(row, width, chunk_max, top, heat, scale, np.int64(top_k[r]), np.float64(top_p[r]),
                       np.float64(min_p[r]), tile, sums, found, mass, histogram)
        noise = _uniform(seed[r], child[r], index[r])
        tokens[r] = _draw(row, width, chunk_max, top, scale, limit, noise, tile, sums)


@_sums
def _count_above(part, value):  # type: ignore[no-untyped-def]
    count = np.int32(0)
    for i in range(len(part)):
        count = np.int32(count + np.int32(part[i] > value))
    return count


@_entry
def logprob_rows(x, stride, width, begin, end, targets, num_top, scratch, histogram, ids, values,  # type: ignore[no-untyped-def]
                 ranks):
    """For rows begin to end: ids[r] = target, then the num_top[r] likeliest tokens (equal ones by id); values[r]:
    their log-probabilities; ranks[r]: 1 + the number of tokens above the target. NaN rows give NaN."""
    num_chunks = (width + CHUNK - 1) // CHUNK
    chunk_max, tile = scratch[:num_chunks], scratch[num_chunks:num_chunks + CHUNK]
    found = scratch[num_chunks + CHUNK:num_chunks + CHUNK + width + 1]
    mass = scratch[num_chunks + CHUNK + width + 1:]
    sums = histogram[BINS:]
    one = np.float32(LOG2E)
    for r in range(begin, end):
        row = x[r * stride:r * stride + width]
        _, top = _scan(row, width, chunk_max)
        ids[r, :], values[r, :] = 0, -np.inf
        if not np.isfinite(top):
            ids[r, 0], values[r, 0], ranks[r] = targets[r], np.nan, 1
            continue
        total = np.log(_chunk_sums(row, width, chunk_max, top, one, np.float32(-np.inf), tile, sums))
        token = targets[r]
        value = row[token]
        ids[r, 0] = token
        values[r, 0] = np.float64(value) - top - total
        rank = 1
        for c in range(num_chunks):
            if chunk_max[c] > value:
                rank += _count_above(row[c * CHUNK:min(width, c * CHUNK + CHUNK)], value)
        ranks[r] = rank
        count = min(np.int64(num_top[r]), width)
        if count <= 0:
            continue
        limit = _kth_largest(row, width, chunk_max, top, count, found, mass, histogram)
        n = 0
        for c in range(num_chunks):
            if chunk_max[c] >= limit:
                for i in range(c * CHUNK, min(width, c * CHUNK + CHUNK)):
                    v = row[i]
                    if v < limit or (n == count and v <= row[ids[r, count]]):
                        continue
                    j = n if n < count else count - 1
                    while j > 0 and row[ids[r, j]] < v:
                        ids[r, j + 1] = ids[r, j]
                        j -= 1
                    ids[r, j + 1] = i
                    n += n < count
        for j in range(1, n + 1):
            values[r, j] = np.float64(row[ids[r, j]]) - top - total


@_entry
def penalise_rows(x, stride, width, rows, slots, counts, seen, num_seen, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """Row rows[i] by the tokens of slot slots[i]: seen[slot, :num_seen[slot]] are the tokens of prompt or output,
    counts[slot, token] how often each was put out."""
    for i in range(len(rows)):
        row, slot = x[rows[i] * stride:rows[i] * stride + width], slots[i]
        factor, per_use, once = np.float32(repetition[i]), np.float32(frequency[i]), np.float32(presence[i])
        for j in range(num_seen[slot]):
            token = seen[slot, j]
            v = row[token]
            v = v * factor if v <= _F0 else v / factor
            used = counts[slot, token] - 1
            if used > 0:
                v = v - per_use * np.float32(used) - once
            row[token] = v


@_entry
def count_tokens(tokens, num_prompt, rows, slots, begin, end, counts, seen, num_seen):  # type: ignore[no-untyped-def]
    """Enter tokens[rows[i], begin[i]:end[i]] into slot slots[i]. counts: 0 never seen, 1 + times put out otherwise."""
    for i in range(len(rows)):
        row, slot = rows[i], slots[i]
        for p in range(begin[i], end[i]):
            token = tokens[row, p]
            if counts[slot, token] == 0:
                counts[slot, token] = 1
                seen[slot, num_seen[slot]] = token
                num_seen[slot] += 1
            if p >= num_prompt[i]:
                counts[slot, token] += 1


_BIT = np.array([1 << i if i < 31 else -(1 << 31) for i in range(32)], np.int32)


@_device
def _mask_word(part, word):  # type: ignore[no-untyped-def]
    for j in range(32):
        part[j] = part[j] if np.int32(word & _BIT[j]) != np.int32(0) else _MINUS_INF


@_device
def _clear(part):  # type: ignore[no-untyped-def]
    for j in range(len(part)):
        part[j] = _MINUS_INF


@_entry
def mask_rows(x, stride, width, rows, begin, end, bits):  # type: ignore[no-untyped-def]
    """Logit t of row rows[i] becomes -inf where bit t of bits[i] (int32 words, lowest bit first) is 0. Words of all
    ones are skipped, runs of zero words are cleared without being read."""
    whole = width // 32
    for i in range(begin, end):
        row, words = x[rows[i] * stride:rows[i] * stride + width], bits[i]
        w = 0
        while w < whole:
            word = words[w]
            if word == np.int32(0):
                first = w
                while w < whole and words[w] == np.int32(0):
                    w += 1
                _clear(row[first * 32:w * 32])
                continue
            if word != np.int32(-1):
                _mask_word(row[w * 32:w * 32 + 32], word)
            w += 1
        for j in range(whole * 32, width):
            if np.int32(words[whole] & _BIT[j - whole * 32]) == np.int32(0):
                row[j] = _MINUS_INF
