"""A headless Chromium that a test drives through its debugging pipe, without a driver or a package of its own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0  # seconds


class Chromium:
    """One window on one page. `faults` are uncaught exceptions, failed requests and violations of the page's policy."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 1000) -> None:
        assert PROGRAM is not None
        read_commands, write_commands = os.pipe()
        read_answers, write_answers = os.pipe()
        # The debugging pipe is descriptors 3 and 4.
        shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
        options = ["--headless=new", "--disable-gpu", "--no-first-run", f"--window-size={width},{height}",
                   f"--user-data-dir={folder}", "--remote-debugging-pipe"]  # fmt: skip
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", PROGRAM, *options, "about:blank"],
            pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._out, self._in, self._buffer, self._number = write_commands, read_answers, b"", 0
        self._session = ""
        self.faults: list[Any] = []
        self.dialogs: list[str] = []
        page = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go to a page; `js` and `until` see what is there by then."""
        self._call("Page.navigate", url=address)

    def js(self, code: str) -> Any:
        """Evaluate an expression in the page."""
        got = self._call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.js(f"(() => {{ try {{ return Boolean({code}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < deadline, f"this never came true: {code}"
            time.sleep(0.02)

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press and release a key, by its name in DOM events."""
        text = {"text": name} if len(name) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, modifiers=8 * shift, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def picture(self) -> bytes:
        """The window as a PNG file."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._send("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def _send(self, method: str, **parameters: Any) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number, deadline = self._send(method, **parameters), time.monotonic() + PATIENCE
        while True:
            message = self._receive(deadline)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params")
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.faults.append(parameters)
        elif method == "Page.javascriptDialogOpening":
            assert parameters is not None
            self.dialogs.append(parameters["message"])
            self._send("Page.handleJavaScriptDialog", accept=True)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))
