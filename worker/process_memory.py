"""Gives memory that is free inside this process back to the system. Knows nothing of what was in it."""
from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator

_WORTHWHILE = 1 << 20                           # bytes of a library's code, below which a call is not worth it


def release_memory() -> None:
    """Collect what nobody refers to, then return the pages (glibc keeps those of freed temporaries otherwise). What is
    left counts as permanent: later collections do not walk it. Code that served to start goes as well."""
    forget_code()
    gc.unfreeze()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:                      # another C library
        pass
    gc.freeze()


def release_device_memory() -> None:
    """Give back what torch keeps for later of the GPU's memory and of pinned host memory. Nothing without a GPU."""
    import torch
    if not torch.cuda.is_available():
        return
    torch.cuda.empty_cache()
    unified = getattr(torch.accelerator, "empty_host_cache", None)
    empty_host_cache = unified or vars(torch._C)["_host_emptyCache"]    # of CUDA builds before torch 2.12
    empty_host_cache()


def discard(address: int, num_bytes: int) -> None:
    """Give back the whole pages of this range, whose contents nobody needs: they read as zeros afterwards, or as the
    file that is mapped there. The allocation itself stays valid."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def forget_code() -> None:
    """Give back the pages of large libraries' code and constants: most served once, to register torch's operators or to
    load compiled kernels by LLVM. What is needed again is mapped again from the system's cache of the file."""
    for first, last in _clean_code():
        discard(first, last - first)


def _clean_code() -> Iterator[tuple[int, int]]:
    """Address ranges that nobody may write and that are the same in memory as in their file. None where there is no
    /proc."""
    try:
        with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    found: tuple[int, int] | None = None
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):          # a mapping begins: range, permissions, offset, device, inode, path
            found = None
            if words[1] in ("r-xp", "r--p") and len(words) > 5 and words[5].startswith("/"):
                first, last = (int(word, 16) for word in words[0].split("-"))
                found = (first, last) if last - first >= _WORTHWHILE else None
        elif found and words[0] == "Anonymous:" and words[1] == "0":    # no page was changed
            yield found
