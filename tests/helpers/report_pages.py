"""Reads pages of reports, and checks what holds for each."""

import re
from html.parser import HTMLParser

VOID = ("meta", "link", "br", "input")


class Page(HTMLParser):
    """The texts of a page by element, its attributes, and that every element ends where it should."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self._stack: list[str] = []
        self.feed(html)
        self.close()
        assert self._stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._stack[-1], data.replace("\u00a0", " ").strip()))

    def of(self, tag: str) -> list[str]:
        return [text for element, text in self.texts if element == tag]

    def values(self, attribute: str) -> list[str]:
        return [value for key, value in self.attributes if key == attribute]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


def checked_page(html: str, pictures: int) -> Page:
    """Parse a page that loads nothing, whose ids are found once, and whose pictures have words for who sees none."""
    page = Page(html)
    assert not re.search(r"https?:|@import|url\((?!#)|<script", html)
    assert page.values("src") == []
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="viewport" content="width=device-width' in html
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    references = {value[1:] for value in page.values("href") if value.startswith("#")}
    assert references | set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)
    assert html.count("<svg") == pictures == len(page.of("figcaption"))
    assert len(re.findall(r'<svg[^>]*role="img"[^>]*aria-labelledby="[^"]+"', html)) == pictures
    assert len(re.findall(r'<desc id="[^"]+">[^<]{20,}</desc>', html)) == pictures
    # Pictures have the page's colours and letters.
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert not re.search(r"#[0-9a-f]{6}\b|<style|font-family", picture)
    return page
