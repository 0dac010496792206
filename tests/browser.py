"""Pages as chromium shows them, by its debugging pipe, and as they are written."""

import itertools
import json
import os
import shutil
import subprocess
from html.parser import HTMLParser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """`with Browser(profile) as browser:`; `events` are all that the page and the log said."""

    def __init__(self, profile):
        self.profile, self.numbers, self.events = profile, itertools.count(1), []

    def __enter__(self):
        (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            # The pipe is file descriptors 3 and 4 of the browser; 8 and 9 are out of their way.
            [
                "bash",
                "-c",
                f'exec 8<&{read_there} 9>&{write_there}; exec 3<&8 4>&9 8<&- 9>&-; exec "$0" "$@"',
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank"),
            ],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.reader, self.writer = os.fdopen(read_here, "rb"), os.fdopen(write_here, "wb")
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(10)
        self.reader.close()
        self.writer.close()

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, height, scheme):
        """Loads a file; `scheme` is light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 500 else 1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.as_uri())
        while self.events.append(event := self._read()) or event["method"] != "Page.loadEventFired":
            pass

    def evaluate(self, expression):
        """The value of an expression, awaited where it is a promise."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def complaints(self):
        """Errors and warnings of the console and the log, exceptions, and requests of the net."""
        bad = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"}
        return [
            event
            for event in self.events
            if event.get("method") in bad
            or (
                event.get("method") == "Network.requestWillBeSent"
                and not event["params"]["request"]["url"].startswith(("file:", "data:"))
            )
        ]

    def _read(self):
        parts = bytearray()
        while (byte := self.reader.read(1)) != b"\0":
            assert byte, "chromium has gone away"
            parts += byte
        return json.loads(parts)


class Page(HTMLParser):
    """The tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
