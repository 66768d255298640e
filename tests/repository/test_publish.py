"""One command writes the address of a published copy into all links. Until then, the front page has no dead badges."""

import re
import runpy

import pytest

from brigade.course.table.modules import ROOT
from brigade.ranks.errors import UserError
from tools import publish

TEXTS = (".md", ".ipynb", ".yml", ".yaml", ".cff", ".json", ".toml", ".mk", "")
PLACES = ("*", "docs/*", "notebooks/*", "site/*", "tools/student/*", "lessons/**/*", ".github/**/*", ".devcontainer/*")


def read_texts(course):
    """Return the texts of the documents, notebooks and settings of a copy of the course."""
    files = {path for place in PLACES for path in course.glob(place) if path.is_file() and path.suffix in TEXTS}
    return {path.relative_to(course).as_posix(): path.read_text(errors="replace") for path in files}


@pytest.fixture
def course(tmp_path):
    for name, text in read_texts(ROOT).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.skipif(publish.PLACEHOLDER not in (ROOT / "assignments.md").read_text(), reason="a published copy")
def test_one_command_sets_the_address_everywhere(course):
    before = read_texts(course)
    holders = {name for name, text in before.items() if publish.PLACEHOLDER in text}
    assert holders and "README.md" not in holders
    changed = {path.relative_to(course).as_posix() for path in publish.publish("ada/ddp-2027", course)}
    after = read_texts(course)
    assert changed == holders | {"README.md", "CITATION.cff"} == {name for name in after if after[name] != before[name]}
    assert not [name for name, text in after.items() if publish.PLACEHOLDER in text]
    links = [link for name in changed for link in re.findall(r"[\w.:/-]*ada\b[\w./-]*", after[name]) if "/" in link]
    assert links and all(re.search(r"\bada(\.github\.io)?/ddp-2027\b", link) for link in links), links
    title, badges, rest = after["README.md"].split("\n", 1)[0], after["README.md"].count("[!["), before["README.md"]
    assert after["README.md"].startswith(f"{title}\n\n[![tests]") and badges == 5 and rest.count("[![") == 0
    assert after["README.md"].endswith(rest.partition("\n")[2])
    assert 'repository-code: "https://github.com/ada/ddp-2027"\n' in after["CITATION.cff"]
    with pytest.raises(UserError, match=r"\balready\b"):
        publish.publish("ada/ddp-2027", course)


@pytest.mark.parametrize("address", ["", "https://ada.github.io/ddp-2027/"])
def test_a_link_to_a_published_page_shows_a_picture(address, monkeypatch):
    describe_page = runpy.run_path(str(ROOT / "site" / "conf.py"))["describe_page"]
    monkeypatch.setitem(describe_page.__globals__, "ADDRESS", address)
    context = {"metatags": "", "title": "Search"}
    describe_page(None, "search", "search.html", context, None)
    assert (f'og:image" content="{address}_static/timeline.png"' in context["metatags"]) == bool(address)


@pytest.mark.parametrize("address", ["ada", "https://github.com/ada/course", "a/b/c"])
def test_what_is_no_address_changes_nothing(address, course):
    before = read_texts(course)
    with pytest.raises(UserError, match="owner/name"):
        publish.publish(address, course)
    assert read_texts(course) == before
