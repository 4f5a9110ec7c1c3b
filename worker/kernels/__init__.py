"""Triton kernels, one per file, each beside its torch reference; configs.py says which tile shapes a launch takes.

Nothing here knows requests, models or scheduling. House rule: values are cast to float32 straight after the load;
bfloat16 and float8 values only go into tl.dot or a store, so the interpreter and the GPU compute the same thing.
"""
