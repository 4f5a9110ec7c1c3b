"""Compiled CPU kernels: numba functions whose inner loops are LLVM vector instructions, and the threads that run them.

`vector.py` is the vocabulary, one file holds one kernel, `program.py` strings kernels into the list of operations that
a team of threads (`team.py`) executes without returning to Python. Nothing here knows requests, models or torch.
"""
