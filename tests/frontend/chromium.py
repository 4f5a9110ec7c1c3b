"""A headless Chromium for tests, spoken to over its debugging pipe: JSON messages that end in a zero byte."""
from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BINARY = next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. Use as a context manager."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 800, is_dark: bool = False) -> None:
        command_read, self._write = os.pipe()
        self._read, reply_write = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--hide-scrollbars", "--disable-background-networking", "--remote-debugging-pipe",
                 f"--user-data-dir={profile}", f"--window-size={width},{height}"]

        def place_pipes() -> None:              # the browser's ends are 3 and 4
            reading, writing = os.dup(command_read), os.dup(reply_write)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen([BINARY or "", *flags], preexec_fn=place_pipes, close_fds=False,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(command_read)
        os.close(reply_write)
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.console: list[str] = []            # errors and violations that the page reported
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}])

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = None
            self.call("Browser.close")          # so that its other processes end, too
            self._process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> Any:
        """One command and its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._calls:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def _receive(self, timeout_s: float = 30.0) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], timeout_s)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])
        return message

    def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 30.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self._holds(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"never came true: {condition}; the page says {self.run('document.body.innerText')}")
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        """False too while one page gives way to another: there is nothing then that could be asked."""
        try:
            return bool(self.run(f"Boolean({condition})"))
        except RuntimeError as error:
            if "navigated or closed" in str(error):
                return False
            raise

    def type(self, text: str, enter: bool = True) -> None:
        """Keys into what has the focus."""
        self.call("Input.insertText", text=text)
        if enter:
            self.key("Enter", 13, "\r")

    def key(self, key: str, code: int, text: str = "") -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path: str | Path) -> None:
        """What is to be seen, as PNG."""
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
