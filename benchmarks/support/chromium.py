"""A headless Chromium that Selenium drives: Debian's packages `chromium` and `chromium-driver`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from pathlib import Path
from typing import Any

PROGRAM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [
    name
    for name, found in (
        ("chromium (apt-get install chromium)", PROGRAM),
        ("chromedriver (apt-get install chromium-driver)", DRIVER),
        ("selenium (pip install selenium)", importlib.util.find_spec("selenium")),
    )
    if not found
]
PATIENCE = 60.0  # seconds
KEYS = {"ArrowDown": "ARROW_DOWN", "ArrowRight": "ARROW_RIGHT", "Backspace": "BACKSPACE", "Enter": "ENTER",
        "Escape": "ESCAPE", "Home": "HOME"}  # fmt: skip


class Chromium:
    """A browser with one window. The keys of its methods have their names in DOM events.

    Args:
        width, height: of the page in the window, pixels.

    Raises:
        RuntimeError: the browser, its driver or Selenium is missing.
    """

    def __init__(self, width: int = 1400, height: int = 860) -> None:
        if MISSING:
            raise RuntimeError(f"a browser needs {' and '.join(MISSING)}")
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = str(PROGRAM)
        for argument in ("--headless=new", "--disable-gpu", *["--no-sandbox"] * (os.geteuid() == 0)):
            options.add_argument(argument)
        options.unhandled_prompt_behavior = "accept and notify"
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        # With both paths given, Selenium looks for no driver and downloads none.
        self._driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self._dialogs: list[str] = []
        self._faults: list[dict[str, Any]] = []
        self._driver.set_window_size(width, height)
        self._driver.set_window_size(
            width + int(self.js("outerWidth - innerWidth")), height + int(self.js("outerHeight - innerHeight"))
        )

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()

    def renew(self) -> Chromium:
        """Replace the window by an empty one, without faults and dialogs."""
        old = self._driver.current_window_handle
        self._driver.switch_to.new_window("tab")
        new = self._driver.current_window_handle
        self._driver.switch_to.window(old)
        self._driver.close()
        self._driver.switch_to.window(new)
        self._driver.get_log("browser")
        self._faults, self._dialogs = [], []
        return self

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Uncaught exceptions, failed requests and violations of the page's policy."""
        self._faults += self._driver.get_log("browser")
        return self._faults

    @property
    def dialogs(self) -> list[str]:
        """Texts of the page's dialogs, each of which was accepted."""
        self.js("0")
        return self._dialogs

    def open(self, address: str) -> None:
        self._driver.get(address)

    def js(self, code: str) -> Any:
        """Evaluate an expression in the page."""
        from selenium.common.exceptions import UnexpectedAlertPresentException

        while True:
            try:
                return self._driver.execute_script(f"return {code}")
            except UnexpectedAlertPresentException as dialog:  # it was accepted, and the expression not evaluated
                self._dialogs.append(dialog.alert_text or "")

    def until(self, code: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true; raises AssertionError after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.js(f"(() => {{ try {{ return Boolean({code}) }} catch {{ return false }} }})()"):
            assert time.monotonic() < deadline, f"this never came true: {code}"
            time.sleep(0.02)

    def key(self, name: str, *, shift: bool = False) -> None:
        from selenium.webdriver import ActionChains, Keys

        pressed = getattr(Keys, KEYS[name]) if name in KEYS else name
        chain = ActionChains(self._driver)
        if shift:
            chain.key_down(Keys.SHIFT)
        chain.send_keys(pressed)
        if shift:
            chain.key_up(Keys.SHIFT)
        chain.perform()

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse on an element and release it, at shares of its width and height; a click where both agree."""
        from selenium.webdriver import ActionChains

        element = self._driver.find_element("css selector", selector)
        width, height = element.size["width"], element.size["height"]
        chain = ActionChains(self._driver, duration=20)
        chain.move_to_element_with_offset(element, int((start[0] - 0.5) * width), int((start[1] - 0.5) * height))
        chain.click_and_hold()
        if end != start:
            chain.move_by_offset(round((end[0] - start[0]) * width), round((end[1] - start[1]) * height))
        chain.release().perform()

    def picture(self, path: Path) -> None:
        self._driver.get_screenshot_as_file(str(path))
