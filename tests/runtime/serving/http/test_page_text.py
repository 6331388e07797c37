from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from playwright.sync_api import expect

from helpers.chat_page import ask, chromium, open_page, wait_for_end
from helpers.fake_chat_server import FakeChatServer, Reply, fake_chat_server

pytestmark = pytest.mark.slow("drives a browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[FakeChatServer]:
    with fake_chat_server() as started:
        yield started


@pytest.fixture(scope="module")
def shared_page(browser: Any, server: FakeChatServer) -> Iterator[Any]:
    """One page for all that only renders text."""
    with open_page(browser, server.url, set()) as opened:
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


def test_text_of_a_model_stays_text(browser: Any, server: FakeChatServer) -> None:
    text = "\n\n".join(HOSTILE)
    server.replies = [Reply([text[place : place + 7] for place in range(0, len(text), 7)])]
    with open_page(browser, server.url, set()) as page:
        ask(page, HOSTILE[0])
        wait_for_end(page)
        expect(page.locator(".bubble")).to_have_text(HOSTILE[0])
        expect(page.locator(".answer .text")).to_contain_text("<img src=x onerror='window.broken = 1'>")
        made = page.evaluate("[...new Set([...document.querySelectorAll('.text *')].map((node) => node.localName))]")
        allowed = {
            "p",
            "a",
            "strong",
            "code",
            "figure",
            "figcaption",
            "span",
            "button",
            "pre",
            "ul",
            "li",
            "blockquote",
        }
        assert set(made) <= allowed | {"div", "table", "tr", "th", "td"}
        links = page.locator(".text a").evaluate_all(
            "(links) => links.map((link) => [link.href, link.rel, link.target])"
        )
        # That nothing is loaded from them, `open_page` sees.
        addresses = ["http://other.example/pixel.png", "http://other.example/", "http://other.example/"]
        assert links == [[address, "noopener noreferrer", "_blank"] for address in addresses]
        assert page.evaluate("window.broken") is None


def test_formatting_can_be_turned_off(browser: Any, server: FakeChatServer) -> None:
    server.replies = [Reply(("# a\n", "  __b__\n", "    *c*"))]
    with open_page(browser, server.url, set()) as page:
        ask(page, "code")
        wait_for_end(page)
        expect(page.locator(".text h2")).to_have_text("a")
        page.get_by_role("button", name="Settings", exact=True).click()
        page.get_by_label("Format answers").uncheck()
        page.get_by_label("Close settings").click()
        expect(page.locator(".text h2")).to_have_count(0)
        assert page.locator(".text").inner_text() == "# a\n  __b__\n    *c*"
        page.reload()
        assert page.locator(".text").inner_text() == "# a\n  __b__\n    *c*"


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_answers_and_code_can_be_copied(browser: Any, server: FakeChatServer, has_clipboard: bool) -> None:
    text = "Look:\n\n```\nx = 1\n  y\n```"
    server.replies = [Reply((text,))]
    permissions = ["clipboard-read", "clipboard-write"]
    with open_page(browser, server.url, set(), permissions=permissions) as page:
        if not has_clipboard:
            # As on http from another machine.
            page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        ask(page, "code")
        wait_for_end(page)
        for button, copied in (("Copy", "x = 1\n  y"), ("Copy answer", text)):
            page.get_by_role("button", name=button, exact=True).click()
            expect(page.locator("#spoken")).to_contain_text("Copied")
            page.get_by_label("Message").fill("")
            page.get_by_label("Message").press("Control+V")
            expect(page.get_by_label("Message")).to_have_value(copied)
