"""Gives memory that is free inside this process back to the system. Knows nothing of what was in it."""
from __future__ import annotations

import ctypes
import gc
import mmap


def release_memory() -> None:
    """Collect what nobody refers to, then return the pages (glibc keeps those of freed temporaries otherwise). What is
    left counts as permanent: later collections do not walk it."""
    gc.unfreeze()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:                      # another C library
        pass
    gc.freeze()


def discard(address: int, num_bytes: int) -> None:
    """Give back the whole pages of this range, whose contents nobody needs: they read as zeros afterwards, or as the
    file that is mapped there. The allocation itself stays valid."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
