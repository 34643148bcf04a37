"""A real Chromium for the tests of the page. They are skipped, with the reason, without one."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Pages wait for what they show as long as commands do.
TIMEOUT_MS = 60_000


def unavailable() -> str:
    """Return why there is none here; "" if there is one."""
    if _executable() is None:
        return "there is no chromium (on Debian: apt-get install chromium)"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return ""


def _executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser that ends with the block. Skips the test where there is none."""
    if why := unavailable():
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without a sandbox, which a container's root cannot have: the pages are our own.
        browser = playwright.chromium.launch(
            executable_path=_executable(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, expected: str = "", **options: Any) -> Iterator[Page]:
    """Yield a page of its own profile, and fail if it has logged or thrown an error that does not
    have what is `expected` in it."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(f"thrown: {error}"))
    page.on(
        "console",
        # Chromium logs each connection that is refused, as while the server is away.
        lambda message: (
            said.append(message.text)
            if message.type == "error" and "net::ERR_" not in message.text
            else None
        ),
    )
    try:
        page.goto(url)
        yield page
        assert [each for each in said if not expected or expected not in each] == []
    finally:
        context.close()
