"""A real server, in a process of its own so that it can be killed, and a real browser."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PATIENCE_S = 30
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)


def free_port() -> int:
    """A server that is to come back must come back where it was."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LiveServer:
    """`wsbatch serve` over the simulated model."""

    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.flags = flags
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> None:
        model = "simulated:tau_ms=20"
        command = [sys.executable, "-P", "-m", "wsbatch", "serve", "--model", model, "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--log-level", "error", *self.flags, *more], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert re.match("listening on ", self.process.stdout.readline())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def terminate(self) -> None:
        """As a service manager ends it: live answers end with `shutdown`."""
        if self.process is not None:
            self.process.terminate()
            self.process.communicate()
            self.process = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture
def start_server() -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def start(*flags: str) -> LiveServer:
        servers.append(LiveServer(*flags))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("Debian's chromium and chromium-driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    os.environ.setdefault("SE_OFFLINE", "true")
    window = webdriver.Chrome(options, Service(driver))
    yield window
    window.quit()


class Page:
    """What a person does with the page."""

    def __init__(self, browser: WebDriver, url: str) -> None:
        self.browser = browser
        browser.get(url)

    def one(self, selector: str, within: WebElement | None = None) -> WebElement:
        return (within or self.browser).find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        return WebDriverWait(self.browser, PATIENCE_S, poll_frequency=0.05).until(lambda _: condition(), what)

    @property
    def status(self) -> str:
        return self.one("#status").text

    def wait_connected(self) -> None:
        self.wait(lambda: self.one("#status").get_attribute("data-state") == "open", "not connected")

    def pane(self, index: int = 0) -> "PaneHandle":
        return PaneHandle(self, self.all(".pane")[index])

    def fill(self, name: str, value: object) -> None:
        """Fill in a sampling control."""
        self.browser.execute_script("document.getElementById('sampling').open = true")
        field = self.one(f"#sampling-form [name={name}]")
        field.clear()
        field.send_keys(str(value))

    def phases_drawn(self) -> set[str]:
        """Which phases' colours are on the canvas."""
        script = """
            const canvas = document.getElementById('timeline');
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const style = getComputedStyle(document.documentElement);
            const seen = new Set();
            const names = {};
            for (const name of ['prefill', 'decode', 'kept', 'idle']) {
                const hex = style.getPropertyValue('--' + name).trim().slice(1);
                names[[0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)).join()] = name;
            }
            for (let at = 0; at < data.length; at += 4) {
                const name = names[[data[at], data[at + 1], data[at + 2]].join()];
                if (name && data[at + 3] === 255) seen.add(name);
            }
            return [...seen];
        """
        return set(self.browser.execute_script(script))

    def pixels(self) -> str:
        drawn: str = self.browser.execute_script("return document.getElementById('timeline').toDataURL()")
        return drawn

    def screenshot(self, path: Path) -> None:
        self.browser.save_screenshot(str(path))


class PaneHandle:
    """One pane of the page."""

    def __init__(self, page: Page, element: WebElement) -> None:
        self.page = page
        self.element = element

    def type(self, text: str) -> None:
        self.page.one(".prompt", self.element).send_keys(text)

    def press(self, name: str) -> None:
        self.page.one(f".{name}", self.element).click()

    @property
    def answer(self) -> str:
        """The last answer so far."""
        found = self.element.find_elements(By.CSS_SELECTOR, ".turn > span")
        text: str = found[-1].get_property("textContent") if found else ""
        return text

    @property
    def busy(self) -> bool:
        return self.element.get_attribute("data-busy") == "true"

    @property
    def stats(self) -> str:
        return self.page.one(".stats", self.element).text

    @property
    def log(self) -> str:
        return self.page.one(".log", self.element).text


@pytest.fixture
def open_page(browser: WebDriver) -> Iterator[Callable[[str], Page]]:
    browser.get_log("browser")
    yield lambda url: Page(browser, url)
    problems = [
        entry["message"]
        for entry in browser.get_log("browser")
        # A connection that fails is the browser's own line, and what some tests are about.
        if entry["level"] == "SEVERE" and entry["source"] != "network"
    ]
    browser.get("about:blank")
    assert problems == []
