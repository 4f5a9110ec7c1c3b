"""OpenAI batch files: reading and checking the input, and an output file that can be continued.

    input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    output  {"id": "batch_req_...", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}

Each output line is written whole and flushed, so a run that was cut off leaves at most one torn last line, which the
next run removes. Knows no engine.
"""
from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from frontend.cli.common import UsageError

MAX_LINE_BYTES = 64 << 20
MAX_SHOWN = 80
EXAMPLE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
LINE_START = b'{"id":"batch_req_'               # of every line we write; only such a line is ever removed


class BatchRequest(msgspec.Struct):
    """One input line. The body stays as it is: the endpoint judges it."""
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _OutputHead(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_head = msgspec.json.Decoder(_OutputHead).decode


def open_input(path: str) -> BinaryIO:
    """The file, or a copy of standard input for "-": it is read twice. Raises UsageError."""
    if path == "-":
        copy = tempfile.TemporaryFile()
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.seek(0)
        return copy
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"--input-file {path}: {error.strerror or error}") from None


def check_input(file: BinaryIO) -> int:
    """The number of requests. Raises UsageError for a line that is none, or an id that is there twice: answers could
    not be told apart. Bodies and urls are not judged here: a wrong one fails alone, in the output."""
    ids: set[str] = set()
    file.seek(0)
    for number, request in requests(file):
        if request.custom_id in ids:
            raise UsageError(f"line {number}: custom_id {request.custom_id[:MAX_SHOWN]!r} was there before; each must "
                             "be its own")
        ids.add(request.custom_id)
    if not ids:
        raise UsageError("the input file has no requests")
    return len(ids)


def requests(file: BinaryIO) -> Iterator[tuple[int, BatchRequest]]:
    """(line number, request) of each line that is not blank. Raises UsageError."""
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
        if not line.strip():
            continue
        try:
            request = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"line {number}: {error}; a line is {EXAMPLE}") from None
        yield number, request


class Output:
    """The output file. `done` are the ids that it already answers."""

    def __init__(self, path: str, *, overwrite: bool = False) -> None:
        """Raises UsageError when it cannot be written, or is no batch output."""
        self.done: set[str] = set()
        self._file: BinaryIO
        if path == "-":
            self._file = sys.stdout.buffer
            return
        try:
            self._file = open(path, "w+b" if overwrite else "a+b")
        except OSError as error:
            raise UsageError(f"--output-file {path}: {error.strerror or error}") from None
        self._read_done(path)

    def _read_done(self, path: str) -> None:
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n") and line[:len(LINE_START)] == LINE_START[:len(line)]:
                break                            # torn: the run before was cut off while it wrote
            try:
                self.done.add(_decode_head(line).custom_id)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._file.close()
                raise UsageError(f"--output-file {path} exists and is no batch output; choose another, or --overwrite"
                                 ) from None
            end += len(line)
            if not line.endswith(b"\n"):         # whole, but for its end
                self._file.write(b"\n")
                end += 1
        if end < os.fstat(self._file.fileno()).st_size:
            self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def write(self, custom_id: str, status: int, request_id: str, body: bytes) -> None:
        """One answer; a status of 400 and more is an error, with the body that a client of the API would have got."""
        error: dict[str, Any] | None = None
        if status >= 400:
            error = error_object(status, body)
        line = msgspec.json.encode({
            "id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}, "error": error})
        self._file.write(line + b"\n")
        self._file.flush()
        self.done.add(custom_id)

    def close(self) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """An API error body, for what is refused before it reaches an endpoint."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def error_object(status: int, body: bytes) -> dict[str, Any]:
    """{"code", "message"} out of an API error body."""
    try:
        inside = msgspec.json.decode(body)["error"]
        return {"code": str(inside.get("type") or status), "message": str(inside["message"])}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return {"code": str(status), "message": body[:300].decode("utf-8", "replace")}
