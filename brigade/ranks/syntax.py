"""Find out whether a submission's text is Python, without the risk that parsing takes all memory or never ends.

CPython's parser needs memory and time that can grow with the square of the length, for example for `import a.a.a`. So a
long text is first parsed in a child process with limits: `python -I syntax.py NAME <TEXT`.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import threading
import unicodedata
import warnings

SHORT = 12_500  # characters; the worst text of this length takes 0.05 GB and 0.05 s, one of 25,000 0.18 GB and 0.2 s
MEMORY_BYTES = 500_000_000
CPU_S = 3  # Python code of the largest size that the course reads takes less than 0.5 s
WAIT_S = 120.0  # on a busy machine

PARSING = threading.Lock()  # in Python 3.11, threads that parse at the same time may raise SystemError


@functools.lru_cache(maxsize=32)  # every check reads the same few files
def find_syntax_error(name: str, text: str) -> str:
    """Return one line that says why the text of the file `name` is not Python, or "" if it is."""
    if len(text) <= SHORT and unicodedata.is_normalized("NFKC", text):  # names with many accents take a second
        return find_error(name, text)
    child = [sys.executable, "-I", __file__, name]
    try:
        done = subprocess.run(child, input=text.encode(errors="replace"), capture_output=True, timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode:
        limits = f"{MEMORY_BYTES / 1e6:.0f} MB of memory and {CPU_S} s"
        return f"{name} is not a Python source file: {limits} are not enough to parse it"
    return done.stdout.decode()


def parse_tree(text: str, name: str = "<unknown>") -> ast.Module:
    """Return the syntax tree of a text, as `ast.parse` does, but without warnings. Threads take turns."""
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in a student's text
        return ast.parse(text, filename=name)


def find_error(name: str, text: str) -> str:
    """Parse the text in this process. Return one line that says why it is not Python, or "" if it is."""
    try:
        parse_tree(text, name)
    except SyntaxError as error:
        where = f"{name}, line {error.lineno}" if error.lineno else name
        line = (error.text or "").strip()[:100]
        return f"{where}: {error.msg}" + (f": {line}" if line else "")
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{name} is not a Python source file: {str(error) or 'parsing takes too much memory'}"
    return ""


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    error = find_error(sys.argv[1], sys.stdin.buffer.read().decode())
    sys.stdout.buffer.write(error.encode("utf-8", errors="replace"))
