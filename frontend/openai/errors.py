"""From exceptions to HTTP: the one table of statuses, and the error body that OpenAI clients unwrap.

Only exceptions named in the table show their text to the caller; anything else is a bug of ours, which is logged with
its traceback and answered without internals.
"""
from __future__ import annotations

import dataclasses
import math

import msgspec

from ipc.errors import EngineDeadError, ModelNotFoundError, OverloadedError, RequestError, RequestFailedError

MAX_MESSAGE_CHARS = 2000


class RouteNotFoundError(RequestError):
    """No such path."""


class ResponseNotFoundError(RequestError):
    """No stored response of this caller has that id."""


class MethodNotAllowedError(RequestError):
    """The path exists, the method does not."""

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLargeError(RequestError):
    """More body bytes than the limit; the rest was not kept."""


class HeadersTooLargeError(RequestError):
    """More header bytes than the limit."""


class UnsupportedMediaTypeError(RequestError):
    """A body that does not say it is JSON."""


class UnauthorizedError(RequestError):
    """No key, or one that does not open this route. Never says which keys exist."""


class NotReadyError(Exception):
    """The engine is still starting."""


class ClientDisconnectedError(Exception):
    """Nobody is left to answer; never becomes a response."""


STATUS_AND_TYPE: dict[type[BaseException], tuple[int, str]] = {
    RequestError: (400, "BadRequestError"),
    UnauthorizedError: (401, "AuthenticationError"),
    ModelNotFoundError: (404, "NotFoundError"),
    RouteNotFoundError: (404, "NotFoundError"),
    ResponseNotFoundError: (404, "NotFoundError"),
    MethodNotAllowedError: (405, "MethodNotAllowedError"),
    BodyTooLargeError: (413, "PayloadTooLargeError"),
    UnsupportedMediaTypeError: (415, "UnsupportedMediaTypeError"),
    OverloadedError: (429, "RateLimitError"),
    HeadersTooLargeError: (431, "HeadersTooLargeError"),
    RequestFailedError: (500, "InternalServerError"),
    EngineDeadError: (503, "ServiceUnavailableError"),
    NotReadyError: (503, "ServiceUnavailableError"),
}


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inside of the error body; `code` is the HTTP status."""
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """What every failed call answers with."""
    error: ErrorInfo


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorReply:
    """One failure, ready to be sent as a response or inside a started stream."""
    status: int
    info: ErrorInfo
    headers: list[tuple[bytes, bytes]]
    is_expected: bool                           # False: a bug of ours, to be logged with its traceback


def describe(exc: BaseException) -> ErrorReply:
    """The reply for an exception: its nearest class in the table decides."""
    known = next((cls for cls in type(exc).__mro__ if cls in STATUS_AND_TYPE), None)
    if known is None:
        info = ErrorInfo("internal error; the server's log has it under this response's x-request-id",
                         "InternalServerError", None, 500)
        return ErrorReply(500, info, [], False)
    status, kind = STATUS_AND_TYPE[known]
    message = str(exc)[:MAX_MESSAGE_CHARS] or kind
    info = ErrorInfo(message, kind, getattr(exc, "param", None), status)
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(exc, OverloadedError):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(exc.retry_after_s))))
    elif isinstance(exc, UnauthorizedError):
        headers.append((b"www-authenticate", b"Bearer"))
    elif isinstance(exc, NotReadyError):
        headers.append((b"retry-after", b"1"))
    elif isinstance(exc, MethodNotAllowedError):
        headers.append((b"allow", exc.allow.encode("ascii", "ignore")))
    elif isinstance(exc, (BodyTooLargeError, HeadersTooLargeError)):
        headers.append((b"connection", b"close"))
    return ErrorReply(status, info, headers, True)
