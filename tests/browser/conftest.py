"""A real headless Chromium, and the pages that it opens from files.

Without Playwright or without a browser these tests are skipped, and say what to install.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_trlcompat.catalog import evidence
from pytest_trlcompat.matrix.report.explorer import html
from pytest_trlcompat.matrix.report.pages import markdown
from pytest_trlcompat.matrix.report.publish import report_of
from tests.hostile import rendered

from .made_up import REPORT

VARIABLE = "TRLCOMPAT_BROWSER"
NAMES = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome", "google-chrome-stable")

pytest.importorskip("playwright.sync_api", reason="needs Playwright; run: nox -s browser")

from playwright.sync_api import Browser, Page, Playwright, sync_playwright  # noqa: E402 - only where it is installed


def _executable(playwright: Playwright) -> str:
    """The browser: the one that is named, one of the system, or one that Playwright has fetched."""
    if named := os.environ.get(VARIABLE):
        if not shutil.which(named):
            pytest.fail(f"{VARIABLE} names {named!r}, which is no program", pytrace=False)
        return named
    for name in NAMES:
        if path := shutil.which(name):
            return path
    if Path(playwright.chromium.executable_path).is_file():
        return playwright.chromium.executable_path
    return pytest.skip(
        "no Chromium was found; install one (apt-get install chromium, or playwright install chromium), "
        f"or name it by {VARIABLE}"
    )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox refuses to run as root, as in a container; these pages are ours.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=_executable(playwright), args=options) as browser:
            yield browser


@dataclass
class Opened:
    """A page, what it wrote to the console, and what it loaded."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def field(self, label: str) -> Any:
        """A filter, by its label."""
        return self.page.get_by_role("searchbox" if label == "Search" else "combobox", name=label, exact=True)

    def square(self, cell: str, issue: str) -> Any:
        """The square of an issue in a cell, by the name that a screen reader says."""
        return self.page.locator(f'#grid td[aria-label^="{issue}, {cell}:"]')

    def box(self, selector: str) -> dict[str, float]:
        """Where the first of these stands on the screen."""
        found = self.page.locator(selector).first.bounding_box()
        assert found is not None
        return dict(found)

    @property
    def cells(self) -> list[str]:
        """The rows that are shown."""
        return self.page.locator("#grid tbody tr:visible th").all_inner_texts()

    @property
    def issues(self) -> list[str]:
        return self.page.locator("#issues .issue:visible").all_inner_texts()

    @property
    def focused(self) -> str:
        """What has the focus, by its label or its text."""
        script = "(e => e.getAttribute('aria-label') || e.textContent)(document.activeElement)"
        return str(self.page.evaluate(script)).strip()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages: of three cells with evidence that is made up, also as Markdown, and of the published sweep."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {"small": html(REPORT), "published": html(report_of(evidence.published()), evidence=False)}
    pages["markdown"] = f'<!doctype html><link rel="icon" href="data:,"><main>{rendered(markdown(REPORT))}</main>'
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


Open = Callable[..., Opened]


@pytest.fixture
def visit(browser: Browser, files: dict[str, Path]) -> Iterator[Open]:
    """Open a page without a network; at the end it must have loaded nothing else, and reported no error."""
    contexts, every = [], []

    def visit(name: str = "small", *, hash: str = "", width: int = 1366, height: int = 768, **options: Any) -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.set_default_timeout(10_000)
        opened.page.on("console", lambda message: opened.messages.append(message.text))
        opened.page.on("pageerror", lambda error: opened.messages.append(str(error)))
        opened.page.on("dialog", lambda dialog: opened.messages.append(f"dialog: {dialog.message}"))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(files[name].as_uri() + hash)
        every.append((opened, files[name].as_uri()))
        return opened

    yield visit
    for context in contexts:
        context.close()
    for opened, address in every:
        assert opened.messages == []
        assert {url.partition("#")[0] for url in opened.requests} == {address}
