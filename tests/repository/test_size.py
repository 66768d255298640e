"""`make lint` fails if the code grows beyond its budget."""

from pathlib import Path

from tools import size


def test_what_exceeds_its_budget_is_named(monkeypatch, capsys):
    monkeypatch.setattr(size, "LINES", {"brigade": 1, "tests": 10**6})
    assert size.main() == 1
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("brigade has ") and first.endswith("; its budget is 1")


def test_a_long_file_and_a_long_function_are_named():
    long_file, long_function = size.MOST_IN_A_FILE + 1, size.MOST_IN_A_FUNCTION
    assert size.find_long_parts(Path("a.py"), "x = 1\n" * (long_file - 1)) == []
    [about_file] = size.find_long_parts(Path("a.py"), "x = 1\n" * long_file)
    assert about_file.startswith(f"a.py has {long_file} lines")
    assert size.find_long_parts(Path("a.py"), "def f():\n" + "    x = 1\n" * (long_function - 1)) == []
    [about_function] = size.find_long_parts(Path("a.py"), "def f():\n" + "    x = 1\n" * long_function)
    assert about_function.startswith(f"a.py: f has {long_function + 1} lines")
