"""Model families over one flat batch of rows, and the loaders that fill them from safetensors or GGUF files.

Knows weights and arithmetic; not requests, sampling, blocks, or where a file came from. `registry.py` lists the
families, `loader.py` is the door.
"""
