"""Likely causes are computed only after a check has failed."""

import ast

import pytest

from brigade.course.modules import MODULES, ROOT

FILES = [*sorted(ROOT.glob("tests/m*/causes.py")), *sorted(ROOT.glob("tests/helpers/[!rt]*.py"))]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_checks_hand_on_causes_and_do_not_compute_them(entry):
    """Checks pass functions of causes.py on, or use them in a `with` statement, but do not call them directly."""
    tree = ast.parse(entry.checks.read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    pairs = {(node.module, alias.asname or alias.name, alias.name) for node in imported for alias in node.names}
    names = {name for module, name, given in pairs if given == "causes" or module.endswith((".causes", ".easier"))}
    opened = [item.context_expr for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in opened]
    functions = [node.func.value if isinstance(node.func, ast.Attribute) else node.func for node in called]
    lines = [function.lineno for function in functions if isinstance(function, ast.Name) and function.id in names]
    assert not lines, f"{entry.checks.name} calls a function of causes.py in these lines; use functools.partial"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_cause_is_used(path):
    """Every function and sentence of these files is used."""
    tests = [path.read_text() for path in (ROOT / "tests").glob("test_m*.py")]
    texts = "\n".join(other.read_text() for other in FILES) + "\n".join(tests)
    for node in ast.parse(path.read_text()).body:
        names = [node.name] if isinstance(node, ast.FunctionDef) else []
        names += [target.id for target in getattr(node, "targets", [])]
        for name in names:
            assert texts.count(name) > 1, f"{path.parent.name}: no check uses {name}"
