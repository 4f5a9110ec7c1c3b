"""Attention over the paged KV pool: one protocol (base), one registry, one file per backend.

Nothing here knows about models, requests or scheduling; a backend sees tensors and a BatchMeta.
"""
