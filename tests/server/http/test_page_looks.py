"""How the page shows things: colours, figures, widths, scrolling, names of controls, and texts of models."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright")

from playwright.sync_api import expect

from helpers.chat_page import ask, open_page, say, wait_for_end
from helpers.fake_chat_server import FakeChatServer, Reply, fake_chat_server

pytestmark = pytest.mark.slow("drives a browser")

WIDE = "A" * 300 + "\n\n```\n" + "x = " * 200 + "\n```\n\n| " + "wide | " * 30
WIDE += "\n|" + " - |" * 30 + "\n\n`" + "b" * 200 + "`"


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
            return [name, getComputedStyle(document.body).color];
        }))""",
        names,
    )
    assert len(set(found.values())) > 6
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(browser: Any, chat_server: FakeChatServer, scheme: str) -> None:
    with open_page(browser, chat_server.url, set(), color_scheme=scheme) as page:
        found = colours(page)
        assert (luminance(found["page"]) < 0.1) == (scheme == "dark")
        for ground in ("page", "raised", "sunken"):
            # WCAG 2.1 AA: 4.5 for text, 3 for what shows where a control is.
            assert all(contrast(found[text], found[ground]) >= 4.5 for text in ("ink", "muted", "fire")), ground
            assert contrast(found["control"], found[ground]) >= 3 or ground == "sunken"
        assert contrast(found["danger"], found["page"]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(browser: Any, chat_server: FakeChatServer, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with open_page(browser, chat_server.url, set(), color_scheme=scheme) as page:

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


def test_the_share_of_neurons_is_shown_and_explained(page: Any, chat_server: FakeChatServer) -> None:
    expect(page.locator("#meter")).to_be_hidden()
    chat_server.replies = [Reply(prompt_tokens=402, cached_tokens=371, finish="length")]
    say(page, "how many?")
    expect(page.locator("#share")).to_have_text("10.0\u00a0%")
    expect(page.locator("#share-unit")).to_have_text("of neurons fired")
    # The first token comes with the prompt, the last one with the mean.
    assert page.locator("#graph path").first.get_attribute("d").count("M") == 2
    for fact in ("4 tokens", "tokens/s", "10.0\u00a0% of neurons fired", "prompt of 402 tokens, 371 from the cache"):
        expect(page.locator(".facts")).to_contain_text(fact)
    expect(page.locator(".facts")).to_contain_text("Cut off at the limit of tokens")
    tip = page.get_by_role("tooltip")
    expect(tip).to_be_hidden()
    page.locator(".explain").hover()
    expect(tip).to_contain_text("Each bar is one token")
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()
    # Without a pointer that hovers: a tap or Enter opens it, Escape closes it.
    page.locator(".explain").focus()
    page.keyboard.press("Enter")
    expect(tip).to_be_visible()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_bar_says_its_text(page: Any, chat_server: FakeChatServer) -> None:
    # On a GPU, the share is known once in some steps.
    chat_server.replies = [Reply(("One", " two", " three", " four", " five", "."), shares=(None, 0.08, None, 0.12))]
    say(page, "how many?")
    box = page.locator("#graph").bounding_box()
    for bar, share, text in ((1, "12.0\u00a0%", "for “four five”"), (2, "8.0\u00a0%", "for “two three”")):
        page.mouse.move(box["x"] + box["width"] - 3 * bar + 1, box["y"] + 10)
        expect(page.locator("#share")).to_have_text(share)
        expect(page.locator("#share-unit")).to_have_text(text)
    page.mouse.move(5, 5)
    expect(page.locator("#share")).to_have_text("10.0\u00a0%")


def test_only_the_last_bars_are_kept(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(["a "] * 302, shares=[0.1] * 100 + [0.2] * 200)]
    say(page, "much")
    chat = page.evaluate("JSON.parse(localStorage.getItem('picompile.chat'))")
    assert [share for share, _ in chat[-1]["fires"]] == [0.2] * 200
    # The number is over all tokens.
    expect(page.locator("#share")).to_have_text("16.6\u00a0%")


def test_a_model_without_shares_has_only_its_speed(page: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(shares=(None,))]
    say(page, "how many?")
    expect(page.locator("#speed")).to_contain_text("tokens/s")
    expect(page.locator(".explain")).to_be_hidden()
    expect(page.locator("#graph")).to_be_hidden()
    expect(page.locator(".facts")).not_to_contain_text("neurons")


def width_beyond(page: Any) -> int:
    """Return by how many px the page, its conversation or an open dialog can be scrolled sideways."""
    places = "[document.documentElement, ...document.querySelectorAll('main, dialog[open]')]"
    beyond: int = page.evaluate(f"Math.max(...{places}.map((place) => place.scrollWidth - place.clientWidth))")
    return beyond


def test_a_narrow_phone_scrolls_down_only(browser: Any, chat_server: FakeChatServer) -> None:
    chat_server.models = ("a-model-with-a-name-that-is-longer-than-a-phone-is-wide", "b")
    chat_server.replies = [Reply((WIDE[:9], WIDE[9:-1], WIDE[-1])), Reply()]
    phone = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
    with open_page(browser, chat_server.url, set(), **phone) as page:
        assert width_beyond(page) == 0
        say(page, "B" * 200)
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


def test_the_end_stays_in_view_unless_one_scrolls_away(browser: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply([f"line {place}\n\n" for place in range(5000)], delay_s=0.02)]
    with open_page(browser, chat_server.url, set(), viewport={"width": 800, "height": 500}) as page:
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


def test_screen_readers_hear_blocks_and_not_tokens(browser: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [
        Reply(re.findall(r"\w+|\W+", "First of all, this.\n\nThen that.\n\n- And a list\n- of two"), delay_s=0.03)
    ]
    with open_page(browser, chat_server.url, set()) as page:
        page.evaluate(
            """() => {
                window.heard = [];
                const note = (change) => change.addedNodes.forEach((node) => heard.push(node.textContent));
                new MutationObserver((changes) => changes.forEach(note)).observe($("spoken"), { childList: true });
            }"""
        )
        say(page, "say")
        assert page.evaluate("heard") == ["First of all, this.", "Then that.", "And a list\n\nof two"]
        # Nothing else that changes with tokens is live.
        live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
        assert page.locator(".text").locator("xpath=ancestor-or-self::*[@aria-live or @role]").count() == 0
        assert live.count() > 0


def test_every_control_has_a_name_and_a_visible_focus(browser: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(("Yes:\n\n```\ncode\n```",))]
    with open_page(browser, chat_server.url, set()) as page:
        say(page, "code?")
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


# Texts of models: Markdown, and nothing that runs or loads.


@pytest.fixture(scope="module")
def shared_page(browser: Any) -> Iterator[Any]:
    """One page for all that only renders text."""
    with fake_chat_server() as server, open_page(browser, server.url, set()) as opened:
        yield opened


def rendered(page: Any, *texts: str) -> str:
    """Return the HTML that the page makes of the last text after it showed those before it in the same place."""
    html = page.evaluate(
        """(texts) => {
            const parent = document.createElement("div");
            for (const text of texts) showText(parent, text);
            return parent.innerHTML;
        }""",
        list(texts),
    )
    return re.sub(r' target="_blank"| rel="noopener noreferrer"', "", html)


def code(language: str, text: str) -> str:
    return (
        f'<figure class="code"><figcaption><span>{language}</span><button type="button" data-do="copy-code">Copy'
        f'</button></figcaption><pre tabindex="0"><code>{text}</code></pre></figure>'
    )


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# One\n### Three ###\n#none", "<h2>One</h2><h4>Three</h4><p>#none</p>"),
        ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
        ("__b__ _c_ snake_case_name 2 * 3 * 4", "<p><strong>b</strong> <em>c</em> snake_case_name 2 * 3 * 4</p>"),
        ("**open and *open", "<p>**open and *open</p>"),
        ("`a < b` and ``c`d``", "<p><code>a &lt; b</code> and <code>c`d</code></p>"),
        (r"\*not\* \\ \n", r"<p>*not* \ \n</p>"),
        ("- a\n- b\n\n  c\n- d", "<ul><li><p>a</p></li><li><p>b</p><p>c</p></li><li><p>d</p></li></ul>"),
        ("* a\n  1. b\n* c", "<ul><li><p>a</p><ol start=\"1\"><li><p>b</p></li></ol></li><li><p>c</p></li></ul>"),
        ("3. a\n4. b\n\nc", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol><p>c</p>'),
        ("> a\n> - b\nc", "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><p>c</p>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        ("```python\nx = *1\n\n# y\n```\nz", code("python", "x = *1\n\n# y") + "<p>z</p>"),
        ("~~~\n```\n~~~", code("", "```")),
        ("```\nstill open", code("", "still open")),
        ("- a\n  ```sh\n  ls\n    -l\n  ```", f"<ul><li><p>a</p>{code('sh', 'ls' + chr(10) + '  -l')}</li></ul>"),
        ("[a](https://b.c/d_(e) \"t\")", '<p><a href="https://b.c/d_(e)">a</a></p>'),
        ("see https://b.c/d?e=f.", '<p>see <a href="https://b.c/d?e=f">https://b.c/d?e=f</a>.</p>'),
        (
            "| a | b |\n|---|:-:|\n| `c` | d |\n\ne",
            '<div class="table" tabindex="0"><table><tr><th>a</th><th>b</th></tr>'
            "<tr><td><code>c</code></td><td>d</td></tr></table></div><p>e</p>",
        ),
        ("a | b", "<p>a | b</p>"),
    ],
)  # fmt: skip
def test_markdown(shared_page: Any, text: str, html: str) -> None:
    assert rendered(shared_page, text) == html


LONG = """# Title

Some *text* with `code` and a [link](https://example.org/a_b).
- one
- two
  1. deep
  2. deeper

     behind

> quoted **strongly

```python
def f(x):
    return x ** 2
```
| a | b |
| - | - |
| 1 | 2 |
Last *words* __here__"""


def test_text_in_pieces_looks_like_text_at_once(shared_page: Any) -> None:
    whole = rendered(shared_page, LONG)
    rng = random.Random(7)
    for step in (1, 2, 5, 17):
        cuts = range(rng.randrange(1, 4), len(LONG), step)
        assert rendered(shared_page, *(LONG[:cut] for cut in cuts), LONG) == whole
    assert rendered(shared_page, LONG + " and more\n\nand more", LONG) == whole


def test_whole_blocks_are_not_made_again(shared_page: Any) -> None:
    kept = shared_page.evaluate(
        """() => {
            const parent = document.createElement("div");
            showText(parent, "one\\n\\n```\\ntwo");
            const [one, two] = parent.children;
            showText(parent, "one\\n\\n```\\ntwo\\nthree");
            return [parent.children[0] === one, parent.children[1] === two, two.querySelector("code").textContent];
        }"""
    )
    assert kept == [True, True, "two\nthree"]


HOSTILE = [
    "<img src=x onerror='window.broken = 1'>",
    "<script>window.broken = 1</script>",
    "[a](javascript:window.broken=1) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>alert(1)</script>)",
    "[d](//other.example/) [e](/v1/models) [f](vbscript:x) [g](\x01javascript:alert(1))",
    "![h](http://other.example/pixel.png)",
    "**<b onclick='window.broken=1'>x</b>** `<i>` # <svg onload='window.broken=1'>",
    "```html\"><img src=x onerror='window.broken=1'>\n<img src=x onerror='window.broken=1'>\n```",
    "| <img src=x onerror='window.broken=1'> |\n| --- |\n| <iframe src='http://other.example/'></iframe> |",
    "- <style>body { display: none }</style>\n\n> <form action='http://other.example/'><button>x</button></form>",
]


def test_text_of_a_model_stays_text(browser: Any, chat_server: FakeChatServer) -> None:
    text = "\n\n".join(HOSTILE)
    chat_server.replies = [Reply([text[place : place + 7] for place in range(0, len(text), 7)])]
    with open_page(browser, chat_server.url, set()) as page:
        say(page, HOSTILE[0])
        expect(page.locator(".bubble")).to_have_text(HOSTILE[0])
        expect(page.locator(".answer .text")).to_contain_text("<img src=x onerror='window.broken = 1'>")
        made = page.evaluate("[...new Set([...document.querySelectorAll('.text *')].map((node) => node.localName))]")
        allowed = "p a strong code figure figcaption span button pre ul li blockquote div table tr th td"
        assert set(made) <= set(allowed.split())
        told = "(links) => links.map((link) => [link.href, link.rel, link.target])"
        links = page.locator(".text a").evaluate_all(told)
        # That nothing is loaded from them, `open_page` sees.
        addresses = ["http://other.example/pixel.png", "http://other.example/", "http://other.example/"]
        assert links == [[address, "noopener noreferrer", "_blank"] for address in addresses]
        assert page.evaluate("window.broken") is None


def test_formatting_can_be_turned_off(browser: Any, chat_server: FakeChatServer) -> None:
    chat_server.replies = [Reply(("# a\n", "  __b__\n", "    *c*"))]
    with open_page(browser, chat_server.url, set()) as page:
        say(page, "code")
        expect(page.locator(".text h2")).to_have_text("a")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Format answers").uncheck()
        page.get_by_label("Close settings").click()
        expect(page.locator(".text h2")).to_have_count(0)
        assert page.locator(".text").inner_text() == "# a\n  __b__\n    *c*"
        page.reload()
        assert page.locator(".text").inner_text() == "# a\n  __b__\n    *c*"


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_answers_and_code_can_be_copied(browser: Any, chat_server: FakeChatServer, has_clipboard: bool) -> None:
    text = "Look:\n\n```\nx = 1\n  y\n```"
    chat_server.replies = [Reply((text,))]
    permissions = ["clipboard-read", "clipboard-write"]
    with open_page(browser, chat_server.url, set(), permissions=permissions) as page:
        if not has_clipboard:
            # As on http from another machine.
            page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        say(page, "code")
        for button, copied in (("Copy", "x = 1\n  y"), ("Copy answer", text)):
            page.evaluate("spoken.textContent = ''")  # the last button said the same
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator("#spoken")).to_contain_text("Copied")
            page.get_by_label("Message").fill("")
            page.get_by_label("Message").press("Control+V")
            expect(page.get_by_label("Message")).to_have_value(copied)
