"""A headless Chromium that tells what it asked for and what it complained about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.cli.command import wait_for

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1300,900",
)  # fmt: skip


class Browser:
    """One window. `asked` are the addresses of all requests since the last `open`."""

    def __init__(self, profile: Path) -> None:
        program, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if program is None or driver is None:
            pytest.skip("chromium and chromium-driver are not installed; make test tries to")
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        self.driver.set_script_timeout(60)
        self.driver.set_page_load_timeout(60)

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str, *, ready: bool = True) -> None:
        """A page as a new visitor sees it."""
        self.driver.get("about:blank")
        self.take_complaints()
        self.take_requests()
        self.driver.get(url)
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.driver.refresh()
        if ready:
            self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(
            lambda: self.script("return document.body.dataset.ready === 'true'"),
            "the page is ready",
        )

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of an element, "" without one; read at once, as it may be replaced at any time."""
        return str(
            self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def press(self, *keys: str) -> None:
        """Keys, wherever the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def press_with_shift(self, key: str) -> None:
        """A key while Shift is held."""
        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    def focus(self) -> str:
        """The id of what has the focus, or its class."""
        return str(
            self.script("return document.activeElement.id || document.activeElement.className")
        )

    def prefer(self, scheme: str) -> None:
        """What the system of this visitor prefers: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        wait_for(condition, what)

    def take_complaints(self) -> list[str]:
        """What the console shows as errors and warnings."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def take_requests(self) -> list[str]:
        """The addresses that were asked for over a network."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith(("about:", "data:"))]
