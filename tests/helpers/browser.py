"""Load a page in Chromium and inspect its requests, console messages and content, without a driver.

Commands use the DevTools protocol over two pipes: JSON messages, each terminated by a zero byte.
"""

import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


class Browser:
    """One tab of a browser, and its events."""

    def __init__(self, process, seconds=60.0):
        self.process, self.until = process, time.monotonic() + seconds
        self.number, self.rest, self.events, self.session = 0, b"", [], None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{part}.enable")

    def look(self, path, scheme="light", width=1100):
        """Load a file with a color scheme and window width."""
        self.events.clear()
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=Path(path).as_uri())
        while not self.happened("Page.loadEventFired"):
            self._receive()
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def value(self, expression):
        """Evaluate an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def asked_for(self):
        """Return the URLs that the page requested, except itself and data URLs."""
        urls = [event["request"]["url"] for event in self.happened("Network.requestWillBeSent")]
        documents = [event["documentURL"] for event in self.happened("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:") and url not in documents]

    def complaints(self):
        """Return exceptions, console calls and log entries."""
        told = [str(event) for event in self.happened("Runtime.exceptionThrown")]
        told += [str(e["args"]) for e in self.happened("Runtime.consoleAPICalled")]
        return told + [e["entry"]["text"] for e in self.happened("Log.entryAdded")]

    def happened(self, name):
        return [event["params"] for event in self.events if event["method"] == name]

    def ask(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, self.until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self.process.stdout.fileno(), 2**16)
            assert more, "the browser has left"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def open_browser(profile):
    """Start a browser with its own profile. If none is installed, skip the test, or fail it in CI."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        sentence = "chromium was not found: apt-get install chromium"
        pytest.fail(sentence) if os.environ.get("CI") == "true" else pytest.skip(sentence)
    # It reads commands from descriptor 3 and writes to 4.
    words = ["sh", "-c", 'exec "$@" 3<&0 4>&1 >/dev/null', "sh", program, *QUIET, "--remote-debugging-pipe"]
    environment = os.environ | {"HOME": str(profile), "XDG_CONFIG_HOME": str(profile), "XDG_CACHE_HOME": str(profile)}
    process = subprocess.Popen(
        [*words, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        browser = Browser(process)
        yield browser
        browser.session = None
        browser.ask("Browser.close")
    finally:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()
