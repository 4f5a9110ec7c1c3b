"""Load generator and baselines: what produces the figures in the README.

Nothing here is imported by a serving process. The load generator speaks HTTP to any OpenAI-compatible server; the
baselines run in one process on the worker's own model.
"""
