"""Write requirements.txt again, which pins all packages with hashes:

    python -m tools.lock [--torch VERSION] [-- OPTIONS]

Versions stay as they are, except those that options of `uv pip compile` after -- let rise: `--upgrade` or
`--upgrade-package numpy`. With names instead, print the entries of these packages and of all that they need:

    python -m tools.lock ruff codespell > out/some.txt

This file needs only Python's own library, because `make demo` runs it before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

LOCK = Path(__file__).resolve().parents[1] / "requirements.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
UV = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.10")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME", help="a package to print, or an option of uv")
    parser.add_argument("--torch", metavar="VERSION", help="the version of torch (default: as it is)")
    chosen = parser.parse_args()
    if chosen.words and not chosen.words[0].startswith("-"):
        print(select(chosen.words), end="")
    else:
        write_lock(chosen.torch, chosen.words)
    return 0


def write_lock(torch: str | None, options: Sequence[str]) -> None:
    """Resolve the packages of pyproject.toml again. Add the hashes of torch without CUDA, which is not on PyPI.

    Keep these hashes if their index cannot be reached and the version of torch stays as it is. Raise CalledProcessError
    if uv fails.
    """
    _, old = set_torch_apart(LOCK.read_text())
    version = torch or get_version(old)
    try:
        known = run_uv(f"torch=={version}+cpu", "-", "--no-deps", "--default-index", CPU_INDEX)
    except subprocess.CalledProcessError:
        if version != get_version(old):
            raise
        print(
            f"The hashes of torch without CUDA stay as they are, because {CPU_INDEX} did not answer.", file=sys.stderr
        )
        known = old
    all_packages = ("pyproject.toml", "--extra", "dev", "--only-binary", ":all:", "--emit-build-options")
    heading = ("--custom-compile-command", "make lock", "--output-file", str(LOCK))
    run_uv(f"torch=={version}", *all_packages, "--constraint", "-", *heading, *options)
    head, entries = read_entries(LOCK.read_text())
    LOCK.write_text(head + "".join(add_hashes(text, known) if name == "torch" else text for name, text in entries))


def run_uv(given: str, *arguments: str) -> str:
    """Run `uv pip compile` with this standard input. Return what it prints."""
    command = [*UV, "--generate-hashes", *arguments]
    return subprocess.run(command, input=given, text=True, check=True, capture_output=True, cwd=LOCK.parent).stdout


def add_hashes(entry: str, source: str) -> str:
    """Return torch's entry with the hashes in `source`, too."""
    pin, _, rest = entry.partition(" \\\n")
    hashes = sorted({*re.findall(r"sha256:\w+", entry), *re.findall(r"sha256:\w+", source)})
    comments = re.findall(r"^ +#.*\n", rest, re.MULTILINE)
    return " \\\n    ".join([pin, *(f"--hash={value}" for value in hashes)]) + "\n" + "".join(comments)


def get_version(entry: str) -> str:
    [version] = re.findall(r"^torch==([^ ]+)", entry, re.MULTILINE)
    return version


def read_entries(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what precedes the first entry, and the name and the lines of each entry."""
    head, *entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)
    return head, [(entry.partition("==")[0], entry) for entry in entries]


def set_torch_apart(text: str) -> tuple[str, str]:
    """Return the entries without torch and what only CUDA needs, and torch's own, as setup.mk divides them."""
    head, entries = read_entries(text)
    others = "".join(entry for name, entry in entries if not re.match(r"torch$|triton$|cuda-|nvidia-", name))
    return head + others, "".join(entry for name, entry in entries if name == "torch")


def select(names: Iterable[str]) -> str:
    """Return the part of requirements.txt with the entries of these packages and of all that they need.

    The comment of each entry names the packages that need it.
    """
    head, entries = read_entries(LOCK.read_text())
    chosen, size = set(names), 0
    if absent := chosen - {name for name, _ in entries}:
        raise SystemExit(f"requirements.txt does not contain {', '.join(sorted(absent))}")
    while size < len(chosen):
        size = len(chosen)
        chosen |= {name for name, entry in entries if chosen & {*re.findall(r"#(?: via|  ) ([\w.-]+)$", entry, re.M)}}
    return head + "".join(entry for name, entry in entries if name in chosen)


if __name__ == "__main__":
    sys.exit(main())
