"""Files that the tests of the laboratory write and read."""

import re

from brigade.course.table.modules import ROOT, get_module


def make_submission(directory, changes=(), modules=(1,)):
    """Return a directory with the solutions of some modules; `changes` are (module, pattern, replacement)."""
    for number in modules:
        entry = get_module(number)
        text = (ROOT / "solutions" / entry.path).read_text()
        for changed, pattern, replacement in changes:
            if changed == number:
                text, count = re.subn(pattern, replacement, text)
                assert count == 1
        (directory / entry.package).mkdir()
        (directory / entry.path).write_text(text)
    return directory
