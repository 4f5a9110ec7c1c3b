"""The engine core process: which tokens are computed next, and who holds which block.

Knows token ids, blocks and hashes. Knows no tensors, no text and no clock: every decision is a function of the messages
received. Reading order: request.py, rows.py, block_manager.py, scheduler.py, core.py, main.py.
"""
