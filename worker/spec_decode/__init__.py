"""Speculative decoding: who proposes drafts (ngram.py) and how they are verified (verify.py)."""
