"""Check the links of a built site without a network."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, and the addresses that the page links to or loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found["id"]} if "id" in found else set()
        self.links |= {found["href"]} if "href" in found and tag == "a" else set()
        self.loaded |= {found["href"]} if "href" in found and tag == "link" else set()
        self.loaded |= {found["src"]} if "src" in found else set()


def find_problems(site: Path) -> list[str]:
    """Return a sentence for each link to a missing file or anchor, and for each file loaded from another site."""
    site = site.resolve()
    pages = {path: Page(path) for path in site.rglob("*.html")}
    problems = []
    for path, page in pages.items():
        for address in sorted(page.links | page.loaded):
            url = urlsplit(address)
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.netloc:
                fault = "is on another site" if address in page.loaded and url.scheme != "data" else ""
            elif not target.is_file():
                fault = "does not exist"
            else:
                known = target not in pages or not url.fragment or unquote(url.fragment) in pages[target].anchors
                fault = "" if known else "has no such anchor"
            if fault:
                problems.append(f"{path.relative_to(site)}: {address} {fault}")
    return problems
