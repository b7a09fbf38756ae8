"""Headless Chromium through its driver, in the words of the W3C WebDriver: needs Debian's chromium-driver alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.job import MARK, marked, wait_for

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium")
MISSING = "chromium and chromium-driver (Debian) are not on PATH"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


class Browser:
    """One window."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": list(_FLAGS)}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base += f"/session/{session['sessionId']}"

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str, *args: Any) -> Any:
        """What the script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """What a reader sees there; empty where there is no such element."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def console(self) -> list[str]:
        """What the page has said since the last call, warnings and broken policies included."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def look(self, *, width: int, dark: bool, height: int = 900, scale: float = 1.0) -> None:
        """How the window is seen from now on."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        taken = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._ask("DELETE", "")

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that is gone, with all its processes and files, when the block ends."""
    assert DRIVER is not None
    log = folder / "chromedriver.log"
    mark = uuid.uuid4().hex
    with log.open("wb") as out, tempfile.TemporaryDirectory(dir=folder) as home:
        command = [DRIVER, "--port=0"]
        environ = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, MARK: mark}
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)
        try:
            found = wait_for(
                lambda: re.search(r"started successfully on port (\d+)", log.read_text(errors="replace")),
                what="chromedriver names its port",
            )
            window = Browser(int(found[1]))
            try:
                yield window
            finally:
                window.close()
        finally:
            process.terminate()
            process.wait(20)
            for pid in marked(mark):  # Chromium's processes end a little later than their driver
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not marked(mark), what="the browser's processes are gone")
