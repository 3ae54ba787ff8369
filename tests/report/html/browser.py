"""Opens pages in a real Chromium, and keeps what its console and its network say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Without these Chromium looks for updates and the like, and wants a sandbox that containers do not give.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTH, HEIGHT = 1200, 900


def find_chromium() -> str:
    """The path of a Chromium; skips the test where there is none, or nothing to drive it with."""
    pytest.importorskip("playwright.sync_api", reason="playwright drives the browser and is not installed")
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no Chromium on the PATH (looked for {', '.join(_NAMES)})")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """A page on the screen.

    Attributes:
        page: playwright's.
        said: what the console said, and errors that nothing caught.
        asked: every address that was asked for.
    """

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def moment(self) -> int:
        return int(self.page.evaluate("window.vramfit.current.view.moment"))

    def events(self) -> tuple[float, float]:
        low, high = self.page.evaluate("[vramfit.current.view.lowRow, vramfit.current.view.highRow]")
        return low, high

    def figure(self, name: str) -> int:
        """A figure of the moment, in bytes."""
        return int(self.page.locator(f"#moment-{name}").get_attribute("data-bytes"))

    def set_moment(self, row: int) -> None:
        self.page.evaluate(
            """row => { const slider = document.getElementById("moment-slider");
            slider.value = row; slider.dispatchEvent(new Event("input")); }""",
            row,
        )
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn: two pictures later at most."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        """A place within an element (from its left upper corner) on the screen, scrolled into view."""
        element = self.page.locator(selector)
        element.evaluate("element => element.scrollIntoView({block: 'center', behavior: 'instant'})")
        box = element.bounding_box()
        return box["x"] + x, box["y"] + y


def open_page(browser: Any, path: Path, **options: Any) -> Opened:
    """Open a file and wait until its pictures are drawn."""
    context = browser.new_context(**{"viewport": {"width": WIDTH, "height": HEIGHT}, **options})
    opened = Opened(page=context.new_page())
    opened.page.set_default_timeout(10_000)
    opened.page.on("console", lambda message: opened.said.append(message.text))
    opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.page.on("request", lambda request: opened.asked.append(request.url))
    opened.page.goto(path.as_uri())
    opened.page.wait_for_selector("#loading", state="hidden")
    opened.settle()
    return opened
