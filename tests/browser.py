"""A headless Chromium for tests, driven over the DevTools protocol through a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
PATIENCE = 60.0
"""Seconds: it shares its cores with all other tests."""


class Browser:
    """One window. ``requests``: every address that it asked for. ``errors``: what its console said was wrong."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number, self._answers, self._rest = 0, {}, b""
        self._folder = tempfile.mkdtemp(prefix="phalanx-browser-")
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        words = [
            str(CHROMIUM), "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
            "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            "--mute-audio", f"--user-data-dir={self._folder}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *words],
            pass_fds=(read, write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        os.set_blocking(self._read, False)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while self._number not in self._answers:
            self._hear()
            assert time.monotonic() < deadline, f"Chromium did not answer {method}"
        answer = self._answers.pop(self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _hear(self) -> None:
        try:
            data = os.read(self._read, 1 << 20)
        except BlockingIOError:
            time.sleep(0.01)
            return
        assert data, "Chromium has ended"
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:1000])
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def ask(self, script: str) -> Any:
        """What an expression is worth there."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Ask until it is true."""
        deadline = time.monotonic() + PATIENCE
        while not (found := self.ask(script)):
            assert time.monotonic() < deadline, (
                f"never true: {script}; {self.errors}; {self.ask('document.body.innerText')}"
            )
            time.sleep(0.03)
        return found

    def choose(self, place: str, value: str | int) -> None:
        """Give a control of this id a value, as a user would."""
        control = f"document.getElementById({json.dumps(place)})"
        self.ask(f"{control}.value = {json.dumps(value)}; {control}.dispatchEvent(new Event('change'))")

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, theme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def drag(self, x: float, y: float, to: float) -> None:
        """The mouse, pressed at a point and let go at another of the same height."""
        for kind, at, buttons in (("mouseMoved", x, 0), ("mousePressed", x, 1), ("mouseMoved", (x + to) / 2, 1),
                                  ("mouseMoved", to, 1), ("mouseReleased", to, 0)):  # fmt: skip
            self.call("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=buttons, clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
