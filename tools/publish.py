"""Write the address of a published copy into its badges and links:

    python -m tools.publish ada/bucket-brigade

Run this once in the clone that you publish, and commit the result. Until then, links to the course's own repository
contain PLACEHOLDER, and the README has no badges.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from brigade.course.cli.errors import run_safely
from brigade.course.table.modules import ROOT
from brigade.ranks.errors import UserError

PLACEHOLDER = "YOUR-ORGANISATION"
NAME = "bucket-brigade"
LINKED = ("assignments.md", "docs/*.md", "notebooks/*.ipynb", ".github/ISSUE_TEMPLATE/config.yml")
BADGES = """
[![tests](https://github.com/{owner}/{name}/actions/workflows/tests.yml/badge.svg)](https://github.com/{owner}/{name}/actions/workflows/tests.yml)
[![site](https://github.com/{owner}/{name}/actions/workflows/site.yml/badge.svg)](https://{owner}.github.io/{name}/)
[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/{owner}/{name}/blob/main/notebooks/kaggle.ipynb)
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/{owner}/{name}/blob/main/notebooks/colab.ipynb)
[![Open in Codespaces](https://github.com/codespaces/badge.svg)](https://codespaces.new/{owner}/{name})
"""


def publish(address: str, course: Path = ROOT) -> list[Path]:
    """Set the address of the repository, "owner/name", in a copy of the course. Return the files that changed."""
    match = re.fullmatch(r"([\w-]+)/([\w.-]+)", address)
    if not match:
        raise UserError(f"{address} is not the address of a repository: write it as owner/name")
    owner, name = match.groups()
    texts = {path: path.read_text() for pattern in LINKED for path in sorted(course.glob(pattern))}
    texts = {path: text for path, text in texts.items() if PLACEHOLDER in text}
    if not texts:
        raise UserError("this copy of the course has an address already")
    readme, citation = course / "README.md", course / "CITATION.cff"
    title, end, rest = readme.read_text().partition("\n")
    texts[readme] = title + end + BADGES.format(owner=owner, name=name) + rest
    site = f"https://{owner}.github.io/{name}/"
    texts[citation] = f'{citation.read_text()}repository-code: "https://github.com/{address}"\nurl: "{site}"\n'
    for path, text in texts.items():
        path.write_text(text.replace(f"{PLACEHOLDER}/{NAME}", address).replace(PLACEHOLDER, owner))
    return list(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="OWNER/NAME", help="the repository on GitHub, such as ada/bucket-brigade")
    options = parser.parse_args()
    return run_safely(lambda: print_changes(options.address), "publish")


def print_changes(address: str) -> int:
    """Publish, and print the names of the files that changed. Return 0."""
    for path in publish(address):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
