"""Fetch Pyodide, which is Python for browsers, for the page that reads dumps: python site/pyodide.py

`make site` does this first. It downloads a package of the npm registry once, and compares its checksum. Without a
network, the site is complete except for this page, which then says so.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path

from sphinx.application import Sphinx

from brigade.course.cli.post_mortem import make_program
from brigade.course.table.modules import HAS_SOLUTIONS  # no student edition has them

COURSE = Path(__file__).resolve().parents[1]
# The version, and the checksum that npm's lock files have for it.
VERSION = "314.0.7"
ADDRESS = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
FETCHED = COURSE / "out" / f"pyodide-{VERSION}"
EXAMPLE = COURSE / "tests" / "m13_post_mortem" / "dumps" / "2.13-nccl.txt"
PAGE = "site/post_mortem"
MISSING = (
    "**This copy of the site cannot read dumps**, because it was built without Pyodide or without the program. Run "
    "`brigade post-mortem dumps` instead: it prints the same on your machine."
)


def fetch() -> bool:
    """Download Pyodide if it is not here. Return False without a network. Raise ValueError if its checksum differs."""
    if FETCHED.is_dir():
        return True
    try:
        with urllib.request.urlopen(ADDRESS, timeout=60) as answer:
            package = answer.read()
    except OSError:
        return False
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
        raise ValueError(f"{ADDRESS} does not have the checksum that {__file__} pins")
    partial = FETCHED.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        for name in FILES:
            (partial / name).write_bytes(archive.extractfile(f"package/{name}").read())
    partial.rename(FETCHED)
    return True


def choose_content(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the page its example, or one sentence instead of the program if it cannot run here."""
    if docname == PAGE and FETCHED.is_dir() and HAS_SOLUTIONS:
        dumps = [line.removeprefix("skip ") for line in EXAMPLE.read_text().splitlines() if line.startswith("skip ")]
        source[0] = source[0].replace("[]", f"[{','.join(dumps)}]")
    elif docname == PAGE:
        source[0] = re.sub("```.*?```", MISSING, source[0], count=1, flags=re.DOTALL)


def copy_program(app: Sphinx, error: Exception | None) -> None:
    """Put Pyodide and the program where the page's script looks for them."""
    if error is None and FETCHED.is_dir() and HAS_SOLUTIONS:
        folder = Path(app.outdir, "_static", "pyodide")
        shutil.copytree(FETCHED, folder, dirs_exist_ok=True)
        (folder / "post_mortem.py").write_text(make_program())


if __name__ == "__main__":
    if not fetch():
        print(f"{ADDRESS} cannot be reached, so the site's page that reads dumps will only say so", file=sys.stderr)
