"""Commands of launch.py that talk to a model: chat, complete, tokenize, models, run-batch. Each module is one command.

A command is a client of the HTTP API (--url) or of AsyncLLM; it knows nothing of scheduling or tensors.
"""
