"""Every failure that has a name, and the codes that travel on the wire.

Does not know HTTP: the one table from these classes to status codes is `frontend/openai/errors.py`.

    ValueError
    ├── ConfigError            a bad option or model file; start is refused with one line
    └── RequestError           the caller's mistake; only that request ends
        └── ModelNotFoundError
    RuntimeError
    ├── EngineDeadError        the engine is gone; carries the reason its process gave
    └── RequestFailedError     the engine could not finish one request (a fault of ours or of the model)
    OverloadedError            try again later; nothing was queued
    WireError                  bytes that are no message of ours; the frame is dropped and counted
"""
from __future__ import annotations


class ConfigError(ValueError):
    """A bad option or model file. Its text names value, limit and fix, and is printed without a traceback."""


class RequestError(ValueError):
    """The caller's mistake. `param` names the field it is about, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(RequestError):
    """The request names a model that this engine does not serve."""


class OverloadedError(Exception):
    """The queue is full. Retriable: nothing of the request was kept."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(RuntimeError):
    """A process of the engine ended; the text is the reason it gave."""


class RequestFailedError(RuntimeError):
    """One request ended with an error inside the engine; others are not affected."""


class WireError(Exception):
    """A frame that is not one of our messages: wrong magic, schema, kind, length or body."""


# What went wrong with one request, as it travels in `Finished.error_code`.
OK = 0
INVALID = 1          # the caller's mistake: RequestError
OVERLOADED = 2       # OverloadedError
FAULT = 3            # RequestFailedError
SHUTDOWN = 4         # the engine is stopping: EngineDeadError


def error_from_code(code: int, message: str) -> Exception:
    """The exception that a wire code stands for."""
    if code == INVALID:
        return RequestError(message)
    if code == OVERLOADED:
        return OverloadedError(message)
    if code == SHUTDOWN:
        return EngineDeadError(message)
    return RequestFailedError(message)


def shown(value: object) -> str:
    """A value as a message has it: short, whatever it is. Its own repr may fail, as that of a huge integer does."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 60 else text[:57] + "..."
