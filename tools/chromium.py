"""Chromium for tests and pictures of pages: real keys, mouse and touch; what it logs and asks for is kept.

It speaks the DevTools protocol over two pipes, so that nothing listens on a port.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "Home": 36}
KEYS |= {"End": 35, "Tab": 9, " ": 32}


def path() -> str | None:
    """Return the browser's program, or None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session
        self.told: list[str] = []  # what the console has, and what went wrong
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, or of what it promises."""
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def wait(self, seconds: float = 0.1) -> None:
        """Let the page go on."""
        self.evaluate(f"new Promise((go) => setTimeout(go, {1000 * seconds}))")

    def key(self, name: str) -> None:
        """Press a key."""
        given = {"key": name, "code": name, "windowsVirtualKeyCode": KEYS[name]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def centre(self, selector: str) -> tuple[float, float]:
        """Return the middle of the first element that a selector finds, on the screen."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(({{left, top, width, height}}) => [left + width / 2, top + height / 2])({box})")
        return x, y

    def hover(self, selector: str) -> None:
        """Move the mouse onto an element."""
        x, y = self.centre(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click on an element."""
        x, y = self.centre(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def tap(self, selector: str) -> None:
        """Touch an element."""
        x, y = self.centre(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, file: Path | str) -> None:
        """Write what is seen."""
        Path(file).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


class Browser:
    """A running Chromium."""

    def __init__(self, profile: Path) -> None:
        if (program := path()) is None:
            raise FileNotFoundError("there is no browser: apt-get install chromium")
        (theirs, ours), (back, answer) = os.pipe(), os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={profile}", "--no-first-run", "--hide-scrollbars", "about:blank"]
        # The browser reads 3 and writes 4. A shell puts them there, as a preexec_fn would fork a process that has JAX.
        place = f'exec 98<&{theirs} 99>&{answer} 3<&98 4>&99 && exec "$0" "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", place, program, *options],
            pass_fds=(theirs, answer),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answer)
        self._to, self._from, self._rest = ours, back, b""
        self._count = 0
        self._tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer; what happens meanwhile is kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._keep(answer)
        raise TimeoutError(method)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _keep(self, event: dict[str, Any]) -> None:
        tab, given = self._tabs.get(event.get("sessionId", "")), event.get("params", {})
        if tab is None:
            return
        match event["method"]:
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                tab.told.append(json.dumps(given)[:600])
            case "Network.requestWillBeSent":
                tab.requests.append(given["request"]["url"])

    def open(
        self, address: str, *, width: int = 1280, height: int = 860, touch: bool = False, dark: bool = False,
        still: bool = True,
    ) -> Tab:  # fmt: skip
        """Open a page in a window of this size, and wait until it has loaded; `still`: the reader wants no motion."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        if touch:
            tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
        features = {"prefers-color-scheme": "dark" if dark else "light"}
        features["prefers-reduced-motion"] = "reduce" if still else "no-preference"
        media = [{"name": name, "value": value} for name, value in features.items()]
        tab.call("Emulation.setEmulatedMedia", features=media)
        tab.call("Page.navigate", url=address)
        loaded = "new Promise((go) => document.readyState === 'complete' ? go() : addEventListener('load', go))"
        tab.evaluate(loaded)
        tab.wait(0.15)
        return tab

    def close(self) -> None:
        """End it."""
        try:
            self.call("Browser.close")
        except (RuntimeError, OSError):
            pass
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser, and end it."""
    running = Browser(profile)
    try:
        yield running
    finally:
        running.close()
