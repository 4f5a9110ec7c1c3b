"""The worker: one process per device. It owns tensors (weights, KV pools, sampling state) and takes no scheduling
decision: it executes the plans it receives, in order.

Shape letters used in every docstring below this package, one meaning each:

    N    tokens of the step, all requests concatenated     V    vocabulary (width of the logits)
    R    requests (rows) of the step                       E    hidden size
    L    rows whose logits are needed                      H    query heads
    B    blocks of the KV pool                             Hkv  key/value heads
    S    block size, tokens per block                      D    head dim
    W    width of the block table
"""
