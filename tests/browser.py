"""A headless Chromium driven over a pipe, in the DevTools protocol: no driver and no library is needed for it."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """Path of a browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, path, profile):
        theirs, ours = os.pipe(), os.pipe()
        # it reads commands from descriptor 3 and writes answers to 4; the sandbox does not start as root or in containers
        command = [path, "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command += ["--no-first-run", f"--user-data-dir={profile}", "about:blank"]
        script = f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(theirs[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self.to, self.back = theirs[1], ours[0]
        self.received = b""
        self.sent = 0
        self.session = None
        self.events = []

    def __enter__(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        # its own processes end with the pipe
        os.close(self.to)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)

    def call(self, method, **parameters):
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.sent:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self):
        end = time.monotonic() + 60
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.back], [], [], max(0, end - time.monotonic()))
            part = os.read(self.back, 1 << 20) if ready else b""
            assert part, f"the browser {'ended' if ready else 'does not answer'}"
            self.received += part
        message, self.received = self.received.split(b"\0", 1)
        return json.loads(message)

    def open(self, url):
        """Go to an address and wait until all is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def type(self, text):
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key, code, text=""):
        """Press and let go a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def scheme(self, name):
        """Take the user to prefer light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width, height):
        """Give the window a size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path):
        """Write what the window shows into a PNG file."""
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self):
        """Messages of the console, uncaught exceptions and requests, since the page was opened."""
        self.ask("1")  # events before this answer are here with it
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        found = [event["params"] for event in self.events if event["method"] in kinds]
        requests = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return found, requests
