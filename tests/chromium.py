"""A headless Chromium, driven over its own debugging pipe: nothing to install but the browser."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60.0  # for one answer: a shared machine stalls

Json = dict[str, Any]


def find() -> str | None:
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Sends commands of the DevTools protocol and keeps the events that come in between."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.process, self._write, self._read = process, write, read
        self._waiting = b""
        self._count = 0
        self.events: list[Json] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> Json:
        self._count += 1
        message: Json = {"id": self._count, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._answer(self._count, method)

    def _answer(self, number: int, method: str) -> Json:
        end = time.monotonic() + SECONDS
        while True:
            message = self._next(end)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    def _next(self, end: float) -> Json:
        while b"\0" not in self._waiting:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {SECONDS:g} s"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"Chromium ended with the status {self.process.poll()}"
            self._waiting += chunk
        first, self._waiting = self._waiting.split(b"\0", 1)
        return json.loads(first)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a fresh profile, and end it."""
    path = find()
    assert path, "no Chromium"
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-pipe", "--no-first-run", "--hide-scrollbars"]
    flags += [f"--user-data-dir={profile}", "about:blank"]
    # Chromium reads commands from descriptor 3 and writes answers to 4; the shell puts them there.
    shell = f'exec "$@" 3<&{in_read} 4>&{out_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", path, *flags],
        pass_fds=(in_read, out_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Browser(process, in_write, out_read)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(in_write)
        os.close(out_read)


class Page:
    """One tab."""

    def __init__(self, owner: Browser) -> None:
        self.owner = owner
        target = owner.send("Target.createTarget", url="about:blank")["targetId"]
        attached = owner.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Json:
        return self.owner.send(method, self.session, **params)

    def open(
        self, file: Path, *, width: int, height: int, scheme: str, touch: bool = False
    ) -> None:
        """Load a file in a window of some size and colour scheme, and wait until it is drawn."""
        self.owner.events.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.send("Emulation.setDeviceMetricsOverride", **metrics, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=file.as_uri())
        end = time.monotonic() + SECONDS
        while self.value("document.readyState + location.href") != "complete" + file.as_uri():
            assert time.monotonic() < end, f"{file} did not load within {SECONDS:g} s"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        params = {"returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", expression=expression, **params)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """Touch the screen with a finger, shortly."""
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def complaints(self) -> list[str]:
        """Exceptions, console errors and warnings, and log entries since the page was opened."""
        found = []
        for event in self.owner.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(json.dumps(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address that was asked for since the page was opened."""
        events = [e for e in self.owner.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in events]

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
