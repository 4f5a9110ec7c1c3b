"""Where numba keeps compiled kernels: a folder that every checkout with the same code shares.

numba names the subfolder by the path of the source. A second checkout then found nothing there, while the stamp of
compiler.py, which goes by what the code says, promised that all was compiled: its start waited for the kernels. Knows
no kernels.
"""
from __future__ import annotations

import os

from numba.core.caching import UserProvidedCacheLocator


class SharedCacheLocator(UserProvidedCacheLocator):
    """In numba's CACHE_DIR, which is named by the content of all kernels, by the name of the package alone. The date of
    a source, which older numbas compare, differs between checkouts."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return os.path.basename(os.path.dirname(os.path.abspath(py_file)))

    def get_source_stamp(self) -> int:
        return os.stat(self._py_file).st_size
