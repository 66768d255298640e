"""What a rank of module 17 gets of an implementation: a package of its own, in which nothing is named after a mistake.

The package has the modules that the implementation needs, and a file `under_test` with the function `wrap`, which the
driver gets. The grader writes this file: it contains the class, a public fault or a harmless change of it, and nothing
of the other faults. The text of the class itself is disguised. So its code differs in each run, whether it is right or
wrong, and equal code proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import functools
import random
from collections.abc import Collection

from brigade.course.table.modules import ROOT, Module, get_module
from brigade.course.table.submission import select_files
from brigade.ranks.syntax import parse_tree
from brigade.ranks.texts import Sources

FAULTS = ROOT / "tests" / "m17_prove_it" / "faults.py"
FILE = "under_test"  # ranks get only its code, because it is a file of the tests
OPTIONS = {"BucketedDDP": {"bucket_cap_mb": 32 / 2**20}, "BufferedDDP": {"bucket_numel": 100}}  # in "accumulated"
# Parameters of the functions that others call: the rest of the names in `faults.py` is nobody's business.
PUBLIC = ("self", "module", "optimizer_cls", "process_group", "bucket_cap_mb", "closure", "max_norm", "state_dict")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def make_package(
    part: str, entry: Module, name: str, change: str, sources: Sources, rng: random.Random | None
) -> Sources:
    """Return the package for a rank: the class `name` of a module with a `change`, an expression of `faults.py` or "".

    With `rng`, the texts of the module are disguised. The earlier modules are the same for right and wrong ones. All
    of them are there, because what an implementation imports could tell what it is.
    """
    package = {key: sources[key] for key in sorted(sources) if key <= f"{entry.package}.~"}
    text = write_under_test(part, entry, name, change)
    if rng:
        own = select_files(entry, package)
        package |= {key: (path, disguise(old, rng)) for key, (path, old) in own.items()}
        text = disguise(text, rng, PUBLIC)
    return {**package, FILE: (str(FAULTS.with_name(f"{FILE}.py")), text)}


def write_under_test(part: str, entry: Module, name: str, change: str) -> str:
    """Return the text of the file that defines `wrap`, with those definitions of `faults.py` that it needs."""
    wrapper = get_module(7)
    steps = [f"{change}(make)"] if change else []
    if part == "sharded":
        steps.append("combine(CachedDDP, make)")
    elif part == "accumulated":
        steps.append(f"add_options(make, {OPTIONS.get(name, {})})")
    body = [*list_definitions("\n".join(steps)), *parse_tree("\n".join(f"make = {step}" for step in steps)).body]
    lines = "\n".join(ast.unparse(node) for node in body).splitlines()
    imports = [ast.unparse(node) for node in read_faults().body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports += [f"from .{entry.package}.{entry.name} import {name}"]
    imports += [f"from .{wrapper.package}.{wrapper.name} import CachedDDP"] * (part == "sharded")
    function = ["def build(make):", *(f"    {line}" for line in lines), "    return make", f"wrap = build({name})"]
    return "\n".join([*imports, *function])


@functools.cache
def read_faults() -> ast.Module:
    """Return the syntax tree of `faults.py`."""
    return parse_tree(FAULTS.read_text())


def find_change(table: str, key: str) -> str:
    """Return the expression of a change in one of the tables of `faults.py`."""
    [values] = [node.value for node in read_faults().body if table in list_names(node)]
    assert isinstance(values, ast.Dict)
    return next(ast.unparse(each) for name, each in zip(values.keys, values.values, strict=True) if key == name.value)


def list_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement at the top of a file defines, except imports."""
    return [node.name] if isinstance(node, SCOPES) else [each.id for each in getattr(node, "targets", ())]


def list_definitions(text: str) -> list[ast.stmt]:
    """Return the statements of `faults.py` that define what a text uses, directly or through each other."""
    defined = {name: node for node in read_faults().body for name in list_names(node)}
    needed: set[str] = set()
    waiting: list[ast.AST] = [parse_tree(text)]
    while waiting:
        used = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} & defined.keys() - needed
        needed |= used
        waiting += [defined[name] for name in used]
    return [node for name, node in defined.items() if name in needed]


# ---- the same program in other words


def disguise(text: str, rng: random.Random, public: Collection[str] = ()) -> str:
    """Return a text that does the same, without comments and docstrings, and with other code.

    Local variables have random names, and each function has an assignment more. If only names in `public` are known
    elsewhere, other parameters and the attributes of `self` get random names, too.
    """
    tree = parse_tree(text)
    local, parameters, other = find_names(tree)
    attributes = {node.attr for node in ast.walk(tree) if is_own_attribute(node)} if public else set()
    private = (parameters | attributes if public else set()) - {*public}
    names = {name: f"v{rng.randrange(10**9)}" for name in sorted((local - parameters | private) - (other - private))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, SCOPES):
            node.name = names.get(node.name, node.name)
        elif isinstance(node, ast.arg):
            node.arg = names.get(node.arg, node.arg)
        elif isinstance(node, ast.Attribute) and node.attr in attributes:
            node.attr = names[node.attr]
        if isinstance(node, (*SCOPES, ast.Module)) and ast.get_docstring(node, clean=False) is not None:
            node.body[:1] = [] if node.body[1:] or isinstance(node, ast.Module) else [ast.Pass()]
        if isinstance(node, SCOPES[:2]):
            more = f"v{rng.randrange(10**9)} = {rng.randrange(10**9)}"
            node.body[(place := rng.randrange(len(node.body))) : place] = parse_tree(more).body
    return ast.unparse(tree)


def is_own_attribute(node: ast.AST) -> bool:
    """Return whether a node sets an attribute of `self`."""
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id == "self"  # type: ignore[attr-defined]


def find_names(tree: ast.AST) -> tuple[set[str], set[str], set[str]]:
    """Return the names that functions define for themselves, those of parameters, and all that must stay."""
    local: set[str] = set()
    parameters: set[str] = set()
    other = {*dir(builtins)}

    def visit(node: ast.AST, is_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_inside = is_function
            if isinstance(child, SCOPES):
                (local if is_function else other).add(child.name)
                is_inside = not isinstance(child, ast.ClassDef)
            elif isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
                (local if is_function else other).add(child.id)
            elif isinstance(child, ast.arg):
                parameters.add(child.arg)
            elif isinstance(child, ast.alias):
                other.add((child.asname or child.name).partition(".")[0])
            elif isinstance(child, (ast.Global, ast.Nonlocal)):
                other.update(child.names)
            elif isinstance(child, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
                other.add(child.name or "")
            visit(child, is_inside or isinstance(child, ast.Lambda))

    visit(tree, False)
    return local, parameters, other
