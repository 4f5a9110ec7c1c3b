"""What the three kinds of process share: messages, their bytes, the sockets that carry them, and the supervisor.

Knows neither tensors nor text nor scheduling. Imports the standard library, msgspec, zmq and numpy only, so that every
process can import all of it.
"""
VERSION = "0.1.0"                               # as in pyproject.toml
