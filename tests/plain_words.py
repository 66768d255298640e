"""Find words and phrases that the course does not use, and say what to write instead.

    python tests/plain_words.py         all documents, notebooks and Python files that git knows
    python tests/plain_words.py FILE... these files

The exit status is 1 if it finds any. Text in backquotes is code and is not searched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each pattern is a whole word or phrase, in any case; a space stands for any white space.
INSTEAD = {
    "anew": "again",
    "(dear|dearer|dearly)": "expensive",
    "(whoever|whosoever|whomever)": "if you, or name the actor",
    "whatsoever": "any",
    "but (for|that) (a|an|the|it|its|one|those|what|this)": "except",
    "for want of": "because there is no",
    "in turns": "alternately, or interleaved",
    "the own": "its own",
    "(thereof|therein|thereby|wherein|whereby|hereby|hereof)": "name the thing",
    "lest": "so that ... not",
    "(ere|nigh|oft|hence forth|henceforth)": "a modern word",
    "nothing else than": "only",
    "(so|as) do(es)? who": "name the actor",
    "stands? in `": "is in",
    "the last but one": "the second to last",
    "the next but one": "the one after the next",
    "(rung|rungs)": "variant",
    "of (its|their) own accord": "by itself",
}
WORDS = {
    re.compile(r"\b" + phrase.replace(" ", r"\s+") + r"(?!\w)", re.IGNORECASE): word for phrase, word in INSTEAD.items()
}
SELF = ("tests/plain_words.py", "tests/toolkit/test_plain_words.py")


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, phrase and what to write instead, for each phrase in the text that is not code."""
    text = re.sub(r"`[^`\n]*`", lambda code: "`" + " " * (len(code[0]) - 2) + "`", text)
    for pattern, instead in WORDS.items():
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def read_prose(path: Path) -> str:
    """Return the text of a file, or the text of all cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def list_files() -> list[Path]:
    """Return the documents, notebooks and Python files that git knows."""
    known = subprocess.run(
        ["git", "ls-files", "*.md", "*.ipynb", "*.py", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in known.stdout.splitlines() if name not in SELF and (ROOT / name).is_file()]


def main(arguments: list[str]) -> int:
    """Print each phrase with its place. Return the exit status."""
    found = [
        f"{path}:{line}: {phrase!r}: write {instead}"
        for path in ([Path(name) for name in arguments] or list_files())
        for line, phrase, instead in find_phrases(read_prose(path))
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
