"""Reads a report's HTML for tests."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects a page's anchors, text by anchor, and tags that are left open."""

    VOID = ("meta", "line", "rect", "circle", "polyline")

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {"": []}
        self.tags: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.texts[dict(attrs)["id"] or ""] = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[list(self.texts)[-1]].append(" ".join(data.split()))


def needs_nothing_else(html: str) -> bool:
    """Whether a page loads nothing and runs nothing."""
    loads = Page(html).tags & {"script", "link", "img", "iframe", "object"}
    return not loads and not any(text in html for text in ("http", "src=", "url(", "@import"))
