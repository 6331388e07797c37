"""The server's page in headless Chromium, watched for errors and for requests to other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser of playwright; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(_OPTIONS))
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Any, url: str, refusals: set[int], **options: Any) -> Iterator[Any]:
    """Yield a page of a new profile. At the end, the page must have logged no error and asked no other host.

    Args:
        browser: as `chromium` yields it.
        url: the page's address.
        refusals: the statuses from 400 that the page may have been answered with; 0 allows refused connections. The
            test may add some while it runs.
        options: what else playwright's new_context takes.
    """
    errors: list[str] = []
    hosts: set[str] = set()
    statuses: set[int] = set()
    context = browser.new_context(**options)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    # Chromium logs an error for each refusal; which there may be, `refusals` says.
    page.on("console", lambda line: line.text.startswith("Failed to load resource") or errors.append(line.text))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("response", lambda response: statuses.add(response.status))
    page.on("requestfailed", lambda request: "ABORTED" in (request.failure or "") or statuses.add(0))
    page.goto(url)
    yield page
    # What the page does last, it does before the next evaluation.
    page.evaluate("0")
    context.close()
    assert errors == []
    assert hosts - {""} == {urlsplit(url).netloc}  # data: has no host
    assert {status for status in statuses if status == 0 or status >= 400} <= refusals


def ask(page: Any, question: str) -> None:
    """Type a question and send it by Enter."""
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def wait_for_end(page: Any) -> None:
    """Wait until no answer is being written."""
    page.wait_for_selector("body:not(.busy)")


def say(page: Any, *questions: str) -> None:
    """Ask questions, each when the one before has its answer, and wait for the last answer."""
    for question in questions:
        ask(page, question)
        wait_for_end(page)
