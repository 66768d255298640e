"""Check the links of a built site without a network."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src", "source": "src"}


def find_problems(site: Path) -> list[str]:
    """Return a sentence for each link to a missing file or anchor, and for each file loaded from another site."""
    pages = {path.resolve(): BeautifulSoup(path.read_bytes(), "html.parser") for path in site.rglob("*.html")}
    anchors = {path: {tag["id"] for tag in page.find_all(id=True)} for path, page in pages.items()}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for tag in page.find_all(list(LINKS)):
            url = urlsplit(tag.get(LINKS[tag.name], ""))
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.netloc:
                if tag.name != "a" and url.scheme != "data":
                    problems.append(f"{name} loads {url.geturl()} from another site")
            elif not target.is_file():
                problems.append(f"{name} links to {url.path}, which does not exist")
            elif url.fragment and target in anchors and unquote(url.fragment) not in anchors[target]:
                problems.append(f"{name} links to {url.geturl()}, but there is no such anchor")
    return problems
