"""Compiles a function for the CPU it runs on, into numba's cache on disk."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

# Sums may be reordered, as vectorisation needs; NaN and infinity are kept. A sum has a loop that writes to no array:
# where one is also written, LLVM checks at run time whether it lies close to what is read, and if so adds up one by
# one. The last bits would then depend on where memory happened to be free.
SUMS = {"reassoc", "contract", "arcp", "nsz"}


def compiled(fastmath: set[str], inline: bool = False) -> Callable[[Any], Any]:
    """`inline`: for functions that other kernels call. Otherwise each caller would bring a copy, with sums ordered and
    products contracted a little differently, and all would use the copy that was there first: one when they are
    compiled, another when they come from the cache.
    """
    compiler = njit(fastmath=fastmath, error_model="numpy", nogil=True, forceinline=inline)

    def compile_and_cache(function: Any) -> Any:
        kernel: Any = compiler(function)
        kernel._cache = _Cache(function)
        return kernel

    return compile_and_cache


class _Cache(FunctionCache):
    """Numba's own looks at the file of a function alone; ours at all kernels, as they call each other."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), _stamp()


@cache
def _stamp() -> str:
    """Returns a digest of the source of all kernels."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
