"""Decoding of quantised weights. `gguf_blocks.py`: the block formats of GGUF files, in numpy.

Knows bytes and numbers; not tensors' names, files, or models.
"""
