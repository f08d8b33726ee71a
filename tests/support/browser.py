"""A headless Chromium that a test drives over a pipe, by its DevTools protocol; it listens nowhere."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.worker_ranks import demand

_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_TIMEOUT_S = 60.0


class Page:
    """A tab: what it logged, requested and opened since `open`, and what its script returns."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path | str, *, width: int = 1200, dark: bool = False) -> None:
        """Load a file or an address, on a screen so wide, in light or dark."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self._await("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """Return what an expression comes to, as JSON has it."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        self.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        script = f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box})"
        x, y = self.evaluate(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self) -> bytes:
        """Return a picture of the whole page, as PNG."""
        data: str = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        return base64.b64decode(data)

    def complaints(self) -> list[str]:
        """Return what the page logged, threw or popped up."""
        kinds = {
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        }
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the URLs that were asked for, the page itself and `data:` apart."""
        found = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        urls = [params["request"]["url"] for params in found if params.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Carry out a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._commands, json.dumps(message | self._to_session()).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _to_session(self) -> dict[str, str]:
        return {"sessionId": self._session} if self._session else {}

    def _await(self, event: str) -> None:
        while not any(each["method"] == event for each in self.events):
            self._read()

    def _read(self) -> dict[str, Any]:
        """Return the next message; an event is kept, and a dialog is closed."""
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0], "no answer"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        if message.get("method") == "Page.javascriptDialogOpening":
            closing = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._commands, json.dumps(closing | self._to_session()).encode() + b"\0")
        return message


@contextlib.contextmanager
def browser_page(directory: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own; skip the test where none is installed."""
    program = demand("chromium")
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    options = [*_OPTIONS, f"--user-data-dir={directory}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    # The browser reads commands at descriptor 3 and answers at 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", program, *options, "about:blank"]
    with open(directory / "browser.log", "wb") as log:
        process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(commands, answers)
    finally:
        os.close(commands)  # it ends by that
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
