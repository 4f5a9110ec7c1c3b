"""Which tile shapes a launch takes: tables by shape and chip, filled by `python -m bench.gpu_kernels --tune`.

Nothing is measured while serving: a lookup is a few comparisons. Every entry compiles without spills and within the
shared memory of the chips it is for (bench/compile_kernels.py proves it). Does not know batches or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

# Shared memory a block may use, bytes, by compute capability. Chips that are not listed get the smallest.
SHARED_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024,
                 103: 227 * 1024, 120: 99 * 1024}
SMALLEST_SHARED_LIMIT = 99 * 1024

MAX_SPLITS = 32
MAX_LINEAR_SPLITS = 8
MIN_TILES_PER_SPLIT = 2  # a split of less work costs more to combine than it saves
FEW_PROGRAMS = 4  # per multiprocessor: with fewer, keys are split however short the parts become
MANY_PROGRAMS = 32  # with fewer, decodes are split into parts of at least PART_KEYS: a last round of programs that
PART_KEYS = 512  # leaves most of the chip idle then costs little
SPLIT_ROWS = 16  # packed query rows of a request that may be split beside prefill chunks
SPLIT_KEYS = 2048  # keys of a split beside prefill chunks: about as long as a chunk's own tile takes
MAX_SPLIT_BYTES = 64 << 20  # workspace of the partial results


@dataclass(frozen=True)
class TileConfig:
    """BLOCK_M packed query rows by BLOCK_N keys; pipeline depth and warps of a program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shared_limit(capability: int) -> int:
    """Bytes of shared memory one block may use."""
    return SHARED_LIMITS.get(capability, SMALLEST_SHARED_LIMIT)


# Tiles by padded head dim, in order of preference; the first that fits the chip is taken. Few rows: decodes. Float32
# goes through tensor cores in three TF32 products, narrow pools through a conversion: both cost registers, so smaller
# tiles.
_FEW_ROWS: dict[int, list[TileConfig]] = {
    64: [TileConfig(16, 128, 4, 3), TileConfig(16, 64, 4, 2), TileConfig(16, 32, 4, 1)],
    128: [TileConfig(16, 64, 4, 3), TileConfig(16, 64, 4, 2), TileConfig(16, 32, 4, 2), TileConfig(16, 16, 4, 1)],
    256: [TileConfig(16, 32, 4, 3), TileConfig(16, 32, 4, 2), TileConfig(16, 16, 4, 2), TileConfig(16, 16, 4, 1)],
}
# Of codes: a tile is half as large, so one more can be on its way.
_FEW_ROWS_NARROW_POOL: dict[int, list[TileConfig]] = {**_FEW_ROWS, 128: [TileConfig(16, 64, 4, 4), *_FEW_ROWS[128]]}
# A tile of float8 has half the bytes and is widened in registers: longer ones spread what a tile costs besides.
_FEW_ROWS_FP8: dict[int, list[TileConfig]] = {**_FEW_ROWS, 128: [TileConfig(16, 128, 4, 3), *_FEW_ROWS[128]]}
# Up to 32 rows: drafts to verify, or many query heads per KV head.
_SOME_ROWS: dict[int, list[TileConfig]] = {
    64: [TileConfig(32, 64, 4, 3), TileConfig(32, 32, 4, 2)],
    128: [TileConfig(32, 64, 4, 3), TileConfig(32, 32, 4, 2)],
    256: [TileConfig(32, 32, 4, 3), TileConfig(32, 16, 4, 2)],
}
_MANY_ROWS_HOPPER: dict[int, list[TileConfig]] = {
    64: [TileConfig(128, 64, 4, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 1)],
    128: [TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2), TileConfig(64, 32, 4, 2), TileConfig(64, 16, 4, 1)],
    256: [TileConfig(128, 32, 8, 3), TileConfig(64, 32, 8, 2), TileConfig(64, 32, 8, 1), TileConfig(32, 16, 4, 1)],
}
_MANY_ROWS_AMPERE: dict[int, list[TileConfig]] = {
    64: [TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 1)],
    128: [TileConfig(128, 64, 8, 3), TileConfig(128, 32, 8, 3), TileConfig(64, 32, 4, 2), TileConfig(64, 16, 4, 1)],
    256: [TileConfig(64, 32, 8, 2), TileConfig(64, 32, 8, 1), TileConfig(32, 16, 8, 1)],
}
_MANY_ROWS_NARROW_POOL: dict[int, list[TileConfig]] = {
    64: [TileConfig(128, 32, 8, 3), TileConfig(64, 32, 4, 2)],
    128: [TileConfig(128, 32, 8, 3), TileConfig(64, 32, 8, 2)],
    256: [TileConfig(64, 16, 8, 3), TileConfig(64, 16, 8, 1)],
}
_MANY_ROWS_NARROW_POOL_BLACKWELL: dict[int, list[TileConfig]] = {
    64: [TileConfig(128, 32, 8, 3), TileConfig(64, 64, 4, 3)],
    128: [TileConfig(128, 32, 8, 3), TileConfig(64, 32, 4, 2)],
    256: [TileConfig(64, 32, 8, 3), TileConfig(64, 32, 4, 2)],
}
_FLOAT32: dict[int, list[TileConfig]] = {
    64: [TileConfig(16, 32, 4, 2)], 128: [TileConfig(16, 32, 4, 2)], 256: [TileConfig(16, 16, 8, 2)],
}
_FLOAT32_LARGE_GROUP = TileConfig(32, 16, 8, 2)  # more than 16 query heads per KV head


def shared_estimate(config: TileConfig, width: int, q_bytes: int, kv_bytes: int) -> int:
    """Upper estimate of a program's shared memory: the query tile and the pipelined K and V tiles; K and V that are
    narrower than q pass through one converted tile."""
    stages = max(1, config.num_stages)
    keys = config.block_n * width
    converted = 2 * keys * q_bytes if kv_bytes != q_bytes else 0
    weights = config.block_m * config.block_n * q_bytes
    return config.block_m * width * q_bytes + 2 * stages * keys * kv_bytes + converted + weights


def padded_dim(dim: int) -> int:
    """Width of a tile: a power of two that tl.dot takes."""
    return max(16, 1 << (dim - 1).bit_length())


def attention_config(
    max_query_len: int, group: int, dim: int, q_bytes: int, kv_bytes: int, capability: int, is_fp8: bool = False
) -> TileConfig:
    """Tiles for requests of up to max_query_len queries, with group = H / Hkv heads of each packed as rows; is_fp8: of
    a float8 pool."""
    num_rows, width = max(1, max_query_len) * group, padded_dim(dim)
    if q_bytes == 4:
        if group > 16:
            return _FLOAT32_LARGE_GROUP
        table = _FLOAT32
    elif num_rows <= 16:
        table = _FEW_ROWS_FP8 if is_fp8 else _FEW_ROWS_NARROW_POOL if kv_bytes < q_bytes else _FEW_ROWS
    elif num_rows <= 32:
        table = _SOME_ROWS
    elif kv_bytes < q_bytes:
        table = _MANY_ROWS_NARROW_POOL if capability < 100 else _MANY_ROWS_NARROW_POOL_BLACKWELL
    else:
        table = _MANY_ROWS_AMPERE if capability < 90 else _MANY_ROWS_HOPPER
    candidates = table[min(256, max(64, width))]
    if table is _MANY_ROWS_AMPERE and width > dim:  # masks of the padding cost registers
        candidates = candidates[-2:]
    limit = shared_limit(capability)
    fitting = (c for c in candidates if shared_estimate(c, width, q_bytes, kv_bytes) <= limit)
    return next(fitting, candidates[-1])


@dataclass(frozen=True)
class MatmulConfig:
    """BLOCK_M rows by BLOCK_N columns, BLOCK_K of the shared dimension at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_config(num_entries: int, num_experts: int, item_bytes: int) -> MatmulConfig:
    """Tiles of the experts' products, for the rows an expert has on average when all are equally liked."""
    per_expert = num_entries / num_experts
    if item_bytes == 4:
        return MatmulConfig(16, 32, 32, 4, 2)
    if per_expert <= 16:  # bound by reading weights: narrow tiles, deep pipeline
        return MatmulConfig(16, 64, 128, 4, 3)
    return MatmulConfig(64, 128, 64, 4, 3) if per_expert <= 128 else MatmulConfig(128, 128, 64, 8, 3)


def linear_config(num_rows: int, item_bytes: int, is_int4: bool) -> MatmulConfig:
    """Tiles of a product with narrow weights. 4-bit ones are two products a tile, which costs registers."""
    if item_bytes == 4:
        return MatmulConfig(16, 32, 32, 4, 2)
    if num_rows <= 16:
        return MatmulConfig(16, 64, 128, 4, 3)
    if num_rows <= 64:
        return MatmulConfig(64, 64, 128, 4, 2 if is_int4 else 3)
    return MatmulConfig(128, 64, 128, 8, 2) if is_int4 else MatmulConfig(128, 128, 64, 8, 3)


def narrow_grouped_config(num_rows: int, item_bytes: int, is_int4: bool) -> MatmulConfig:
    """Tiles of the experts' products with narrow weights, for the rows an expert has on average."""
    if num_rows <= 16 and item_bytes < 4 and not is_int4:  # longer tiles spill on 10.0
        return MatmulConfig(16, 64, 64, 4, 4)
    return linear_config(num_rows, item_bytes, is_int4)


def linear_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Over how many programs the inputs of a product are shared out: enough to fill the chip, none with less than
    MIN_TILES_PER_SPLIT tiles."""
    return max(1, min(2 * num_processors // num_programs, num_tiles // MIN_TILES_PER_SPLIT, MAX_LINEAR_SPLITS))


def row_warps(size: int) -> int:
    """Warps of a program that handles one row of `size` elements: about 16 elements a thread."""
    return min(16, max(1, size // 512))


HEADS_PER_PROGRAM = 4  # heads one program of qkv_rope_kv_write handles: enough programs at one row, full lines at many
ARGMAX_CHUNK = 4096  # logits one program of the first arg-max pass reads
ELEMENTS_PER_PROGRAM = 1024  # of element-wise kernels
