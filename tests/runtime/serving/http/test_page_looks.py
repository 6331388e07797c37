"""Colours, widths, scrolling, names of controls, and text for screen readers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from playwright.sync_api import expect

from helpers.chat_page import ask, chromium, open_page, wait_for_end
from helpers.fake_chat_server import PAGE, FakeChatServer, Reply, fake_chat_server

pytestmark = pytest.mark.slow("drives a browser")

WIDE = (
    "A" * 300
    + "\n\n```\n"
    + "x = " * 200
    + "\n```\n\n| "
    + "wide | " * 30
    + "\n|"
    + " - |" * 30
    + "\n\n`"
    + "b" * 200
    + "`"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[FakeChatServer]:
    with fake_chat_server() as started:
        yield started


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(…)`, as WCAG 2 defines it."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def colours(page: Any) -> dict[str, str]:
    """Return what the variables of the page's colours are now."""
    names = ["page", "raised", "sunken", "control", "ink", "muted", "fire", "fire-glow", "danger"]
    found: dict[str, str] = page.evaluate(
        """(names) => Object.fromEntries(names.map((name) => {
            document.body.style.color = `var(--${name})`;
            const colour = getComputedStyle(document.body).color;
            document.body.style.color = "";
            return [name, colour];
        }))""",
        names,
    )
    assert len(set(found.values())) > 6
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(browser: Any, server: FakeChatServer, scheme: str) -> None:
    with open_page(browser, server.url, set(), color_scheme=scheme) as page:
        found = colours(page)
        assert (luminance(found["page"]) < 0.1) == (scheme == "dark")
        for ground in ("page", "raised", "sunken"):
            # WCAG 2.1 AA: 4.5 for text, 3 for what shows where a control is.
            assert all(contrast(found[text], found[ground]) >= 4.5 for text in ("ink", "muted", "fire")), ground
            assert contrast(found["control"], found[ground]) >= 3 or ground == "sunken"
        assert contrast(found["danger"], found["page"]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(browser: Any, server: FakeChatServer, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with open_page(browser, server.url, set(), color_scheme=scheme) as page:

        def shown() -> str:
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            # Pages are told of the system's change with the next frame.
            expect(page.locator("meta[name=theme-color]")).to_have_attribute("content", colour)
            return "dark" if luminance(colour) < 0.1 else "light"

        assert shown() == scheme
        page.get_by_label(f"{other.title()} colours").click()
        assert shown() == other
        page.reload()
        assert shown() == other
        page.get_by_label(f"{scheme.title()} colours").click()
        assert shown() == scheme
        page.emulate_media(color_scheme=other)
        assert shown() == other


def width_beyond(page: Any) -> int:
    """Return by how many px the page, its conversation or an open dialog can be scrolled sideways."""
    places = "[document.documentElement, ...document.querySelectorAll('main, dialog[open]')]"
    beyond: int = page.evaluate(f"Math.max(...{places}.map((place) => place.scrollWidth - place.clientWidth))")
    return beyond


def test_a_narrow_phone_scrolls_down_only(browser: Any, server: FakeChatServer) -> None:
    server.models = ("a-model-with-a-name-that-is-longer-than-a-phone-is-wide", "b")
    server.replies = [Reply((WIDE[:9], WIDE[9:-1], WIDE[-1])), Reply()]
    phone = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    with open_page(browser, server.url, set(), **phone) as page:
        assert width_beyond(page) == 0
        ask(page, "B" * 200)
        wait_for_end(page)
        expect(page.locator("#meter")).to_be_visible()
        assert width_beyond(page) == 0
        # Below 16 px, phones zoom into a field.
        sizes = page.locator("input, textarea, select").evaluate_all(
            "(fields) => fields.map((field) => parseFloat(getComputedStyle(field).fontSize))"
        )
        assert min(sizes) >= 16
        page.locator(".explain").tap()
        expect(page.get_by_role("tooltip")).to_be_visible()
        assert width_beyond(page) == 0
        page.get_by_role("button", name="Settings", exact=True).tap()
        assert width_beyond(page) == 0
        page.get_by_label("Close settings").tap()
        page.get_by_label("Edit question").tap()
        expect(page.get_by_label("Question", exact=True)).to_be_visible()
        assert width_beyond(page) == 0
    server.models = ("tiny",)


def test_the_end_stays_in_view_unless_one_scrolls_away(browser: Any, server: FakeChatServer) -> None:
    server.replies = [Reply([f"line {place}\n\n" for place in range(5000)], delay_s=0.02)]
    with open_page(browser, server.url, set(), viewport={"width": 800, "height": 500}) as page:
        ask(page, "much")
        expect(page.locator(".text")).to_contain_text("line 40")
        where = "(({ scrollTop, scrollHeight, clientHeight }) => [scrollTop, scrollHeight - clientHeight])($('log'))"
        top, most = page.evaluate(where)
        assert top > 0
        assert most - top < 60
        page.mouse.move(400, 200)
        page.mouse.wheel(0, -300)
        expect(page.get_by_label("To the end")).to_be_visible()
        away, _ = page.evaluate(where)
        count = page.locator(".text p").count()
        page.wait_for_function("(count) => document.querySelectorAll('.text p').length > count + 5", arg=count)
        top, most = page.evaluate(where)
        assert top <= away < most
        page.get_by_label("To the end").click()
        expect(page.get_by_label("To the end")).to_be_hidden()
        page.wait_for_function("(count) => document.querySelectorAll('.text p').length > count + 20", arg=count)
        page.keyboard.press("Escape")
        wait_for_end(page)
        top, most = page.evaluate(where)
        assert most - top < 60


def test_screen_readers_hear_blocks_and_not_tokens(browser: Any, server: FakeChatServer) -> None:
    server.replies = [
        Reply(re.findall(r"\w+|\W+", "First of all, this.\n\nThen that.\n\n- And a list\n- of two"), delay_s=0.03)
    ]
    with open_page(browser, server.url, set()) as page:
        page.evaluate(
            """() => {
                window.heard = [];
                const note = (change) => change.addedNodes.forEach((node) => heard.push(node.textContent));
                new MutationObserver((changes) => changes.forEach(note)).observe($("spoken"), { childList: true });
            }"""
        )
        ask(page, "say")
        wait_for_end(page)
        assert page.evaluate("heard") == ["First of all, this.", "Then that.", "And a list\n\nof two"]
        # Nothing else that changes with tokens is live.
        live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
        assert page.locator(".text").locator("xpath=ancestor-or-self::*[@aria-live or @role]").count() == 0
        assert live.count() > 0


def test_every_control_has_a_name_and_a_visible_focus(browser: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(("Yes:\n\n```\ncode\n```",))]
    with open_page(browser, server.url, set()) as page:
        ask(page, "code?")
        wait_for_end(page)
        names = page.locator("button, input, select, textarea").evaluate_all(
            """(all) => all.map((one) => {
                const labels = [...(one.labels ?? [])].map((label) => label.textContent);
                return one.getAttribute("aria-label") || labels.join("") || one.innerText;
            })"""
        )
        assert len(names) > 20
        assert all(name.strip() for name in names), names
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            name, style = page.evaluate(
                """() => {
                    const one = document.activeElement;
                    return [one.id || one.dataset.do || one.className, getComputedStyle(one).outlineStyle];
                }"""
            )
            reached.add(name)
            # The field is at the card's border, which shows it.
            assert style != "none" or name in ("question", ""), name
        assert {"new", "theme", "open-settings", "log", "question", "copy", "edit", "again", "copy-code"} <= reached


def test_the_page_names_no_other_host(browser: Any, server: FakeChatServer) -> None:
    page = PAGE.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s'\"<>)]+", page))
    assert addresses - {"http://www.w3.org/2000/svg"} == set()
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page
    assert not re.search(r"<[^>]+ (style|on\w+)=", re.sub(r"(?s)<(style|script)>.*?</\1>", "", page))
