"""Search the text of a submission for names that no answer needs.

The recorder of collectives and the training loop run in the rank, beside the submission, so some attacks on them cannot
be prevented. The text of an attack must still contain the names that it uses. This file parses the text of each module,
runs nothing, and lists such names with file and line for the instructor. The list changes no score. A name on the list
proves nothing, and an empty list proves nothing either: see `docs/instructors.md`.

The rules are the table of names (`NAMES`) and the following. Imports must come from a short list. A submission must not
assign to torch, pass a module on as a value, compute the name of an attribute, or use special and private names of
other objects. The static check also searches strings, even if they are concatenated from constant parts.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import MODULES, CourseError, Module
from brigade.course.submission import find, read_source

HEADING = "please look"
MOST_FINDINGS = 20  # for one submission; the last finding gives the number of the others
MOST_LINES = 4  # shown for one name
MOST_NODES = 50_000  # in a file's syntax tree; the trees of the solutions have fewer than 2 000
MOST_ALIASES = 4  # in a chain of aliases
MOST_CHARACTERS = 200  # of a string or a dotted name; a longer one is not a name

FRAMES = "reads the frames of other functions"
INTERNALS = "accesses the internals of functions, classes or modules"
CODE = "runs text as code"
HIDDEN = "can hide a name in data"
SYSTEM = "accesses files, processes, threads or the interpreter"
OUTSIDE = "moves data where torch does not see it"
TOOLKIT = "names a part of the course's toolkit"
GROUP = "creates a process group or a store"
HOOKS = "changes hooks or functions globally"
ANSWER = "is torch's own solution"
ENDING = "ends the process"


def split_words(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


NAMES: dict[str, str] = {
    name: reason
    for reason, names in {
        FRAMES: """_getframe _current_frames currentframe f_back f_builtins f_code f_globals f_lineno f_locals f_trace
            tb_frame tb_next gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await ag_frame ag_code with_traceback
            exc_info last_traceback settrace setprofile""",
        INTERNALS: """cell_contents co_code co_consts co_filename co_names CodeType FunctionType ModuleType CellType
            func_globals get_objects get_referrers get_referents getattr_static mro""",
        CODE: "__import__ ForwardRef get_type_hints import_module load_inline run_module run_path singledispatch",
        HIDDEN: "b64decode decode fromhex maketrans rot13 unhexlify",
        SYSTEM: """_exit CDLL add_key cpp_extension keyctl syscall memfd_create pidfd_open py_object pythonapi
            ThreadPoolExecutor ProcessPoolExecutor start_new_thread""",
        OUTSIDE: "frombuffer from_blob from_dlpack from_file from_numpy memmap numpy to_dlpack",
        TOOLKIT: "_inner _recorder _sink brigade scenarios RecordingGroup StrictGroup RecordedWork",
        GROUP: """_get_backend _register_backend register_backend init_process_group destroy_process_group
            split_group ProcessGroupGloo ProcessGroupMPI ProcessGroupNCCL ProcessGroupWrapper
            _ProcessGroupWrapper FileStore HashStore PrefixStore TCPStore""",
        HOOKS: """hooks_dict_ref _post_accumulate_grad_hooks _backward_hooks _forward_hooks _forward_pre_hooks overrides
            TorchDispatchMode TorchFunctionMode _python_dispatch register_module_forward_hook
            register_module_forward_pre_hook register_module_full_backward_hook register_module_backward_hook
            register_module_module_registration_hook register_module_parameter_registration_hook
            register_optimizer_step_post_hook register_optimizer_step_pre_hook""",
        ANSWER: """DataParallel DistributedDataParallel FSDPModule FullyShardedDataParallel Reducer fsdp fully_shard
            replicate ZeroRedundancyOptimizer""",
    }.items()
    for name in names.split()
}
BUILTINS: dict[str, str] = {
    **dict.fromkeys(("eval", "exec", "compile"), CODE),
    **dict.fromkeys(("globals", "locals", "vars", "dir", "memoryview"), INTERNALS),
    **dict.fromkeys(("open", "help"), SYSTEM),
    **dict.fromkeys(("exit", "quit", "SystemExit", "KeyboardInterrupt", "GeneratorExit"), ENDING),
    "chr": HIDDEN,
}
BY_NAME = ("getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller")  # take an attribute's name

IMPORTS = split_words(
    """__future__ abc bisect collections contextlib copy dataclasses enum functools heapq itertools math numbers
    operator random time torch types typing typing_extensions warnings weakref"""
)
LIBRARY = frozenset(sys.stdlib_module_names)
SYSTEM_MODULES = split_words(  # modules of the library that no answer needs as an attribute or in a string
    """_ctypes _io _posixsubprocess _thread asyncio atexit base64 binascii builtins codecs concurrent ctypes dis
    faulthandler fcntl gc importlib inspect marshal mmap multiprocessing os pathlib pdb pickle posix pty resource
    runpy shelve shutil signal socket subprocess sys tempfile threading traceback tracemalloc zipimport"""
)
TORCH_MODULES = split_words(  # parts of torch that no answer needs
    """_C backends classes cpp_extension export fx hub jit library load multiprocessing ops overrides package parallel
    rpc save serialization"""
)
KNOWN_MODULES = split_words(  # modules of torch that an answer may import, but not pass on as values
    """torch torch.autograd torch.cuda torch.distributed torch.distributed.distributed_c10d torch.nn torch.nn.functional
    torch.nn.utils torch.optim torch.utils"""
)
BASES = {"torch.Tensor": "a custom tensor class", "torch.distributed.ProcessGroup": "a custom process group"}

METHODS = frozenset(  # special methods that an answer may define or call
    f"__{name}__"
    for name in split_words(
        """init call enter exit len iter next getitem setitem delitem contains repr str format bool hash eq ne lt le gt
        ge add radd sub mul int float index getattr setattr post_init reversed"""
    )
)
READ = METHODS | {"__name__", "__qualname__", "__class__", "__doc__", "__main__", "__all__", "__version__"}
SET = METHODS | {"__all__", "__slots__", "__version__", "__author__", "__match_args__"}
PRIVATE = split_words(  # names of torch and the library that an answer may use
    """_CoalescingManager _all_gather_base _asdict _base _buffers _coalescing_manager _fields _flatten_dense_tensors
    _get_default_group _modules _parameters _reduce_scatter_base _replace _unflatten_dense_tensors _utils _world"""
)

SPECIAL = re.compile(r"__\w+__")
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
IN_TEXT = re.compile(rf"\b({'|'.join(name for name in NAMES if '_' in name)})\b")
ENCODING = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")  # PEP 263
DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Finding:
    """A suspicious name in a file, with its lines and the reason. A finding without lines concerns the whole file."""

    file: str
    lines: tuple[int, ...]
    name: str
    reason: str

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.lines[:MOST_LINES])) + (", ..." if len(self.lines) > MOST_LINES else "")
        where = f"{self.file}:{shown}" if self.lines else self.file
        return f"{where}: {self.name}: {self.reason}" if self.name else f"{where}: {self.reason}"


def look_at(target: Path, entries: Sequence[Module]) -> list[Finding]:
    """List the findings in the modules of `target` that a grading run of `entries` may import."""
    texts, findings = {}, []
    last = max((entry.number for entry in entries), default=0)
    for entry in MODULES:
        path = find(target, entry) if entry.number <= last else None
        if path is None:
            continue
        try:
            texts[str(entry.path)] = read_source(path, target)
        except CourseError as error:
            findings.append(Finding(str(entry.path), (), "", f"cannot be examined: {error}"))
    return findings + look(texts)


def look(texts: Mapping[str, str]) -> list[Finding]:
    """List the findings in these files of one submission, at most MOST_FINDINGS."""
    findings: list[Finding] = []
    nodes: dict[str, list[ast.AST]] = {}
    for file, text in texts.items():
        try:
            nodes[file] = parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            findings.append(Finding(file, (), "", f"cannot be examined: {error or type(error).__name__}"))
    own = {name for of_file in nodes.values() for name in find_private_names(of_file)}
    for file, of_file in nodes.items():
        occurrences: dict[tuple[str, str], set[int]] = {}
        for line, name, reason in (*find_odd_lines(texts[file]), *FileLook(of_file, own).list_findings()):
            occurrences.setdefault((name[:60], reason), set()).add(line)
        found = [Finding(file, tuple(sorted(lines)), *what) for what, lines in occurrences.items()]
        findings += sorted(found, key=lambda finding: (finding.lines, finding.name))
    if len(findings) > MOST_FINDINGS:
        left_out = len(findings) - MOST_FINDINGS + 1
        findings[MOST_FINDINGS - 1 :] = [Finding("and more", (), "", f"{left_out} other names are worth a look")]
    return findings


def parse(text: str) -> list[ast.AST]:
    """Return the nodes of the text, parents before their children. No code here recurses into them.

    Raise ValueError if there are more than MOST_NODES, and raise what `ast.parse` raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escape sequences in a student's text
        tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if not isinstance(node, (ast.expr_context, ast.operator))]
    if len(nodes) > MOST_NODES:
        raise ValueError(f"its syntax tree has more than {MOST_NODES} nodes")
    return nodes


def find_odd_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Find lines that Python may read differently from the way in which an editor shows them."""
    for number, line in enumerate(text.splitlines(), 1):
        if number <= 2 and (declared := ENCODING.match(line)) and declared[1].lower() not in ("utf-8", "utf8"):
            yield number, declared[1], "declares an encoding"
        if DIRECTIONS.search(line):
            yield number, "text direction", "has characters that change the order in which editors show the line"


def find_private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Find the private names that a file defines itself: functions, classes, variables, attributes."""
    for node in nodes:
        name = None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name and name[0] == "_" and not SPECIAL.fullmatch(name):
            yield name


class FileLook:
    """The analysis of one file.

    `paths` maps the id of each node that refers to an imported name, such as `dist.all_reduce`, to its full dotted
    name. `strings` maps the ids of nodes to the constant strings that they evaluate to.
    """

    def __init__(self, nodes: Sequence[ast.AST], own_private_names: set[str]):
        self.nodes = nodes
        self.own = own_private_names
        self.bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        self.bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        self.bound |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
        self.imported = dict(list_imported_names(nodes))
        self.strings: dict[int, str] = {}
        for node in reversed(nodes):  # children before their parents
            if (value := evaluate_string(node, self.strings)) is not None and len(value) <= MOST_CHARACTERS:
                self.strings[id(node)] = value
        self.paths: dict[int, str] = {}
        self.resolve_paths()
        for _ in range(MOST_ALIASES):
            if not self.find_aliases():
                break
            self.resolve_paths()
        self.plain_uses = self.find_plain_uses()

    def resolve_paths(self) -> None:
        """Resolve the dotted names that begin with an imported name or an alias."""
        for node in reversed(self.nodes):
            path = None
            if isinstance(node, ast.Name):
                path = self.imported.get(node.id)
            elif isinstance(node, ast.Attribute):
                path = self.join_path(node.value, node.attr)
            elif name := self.find_attribute_by_name(node):
                path = self.join_path(node.args[0], name)
            elif name := self.find_module_by_name(node):
                path = name
            elif isinstance(node, ast.NamedExpr):
                path = self.paths.get(id(node.value))
            if path and len(path) <= MOST_CHARACTERS:
                self.paths[id(node)] = path

    def find_aliases(self) -> bool:
        """Treat names such as `d` in `d = torch.distributed` as imported. Return whether a new name was found."""
        known = len(self.imported)
        for node in self.nodes:
            for target in list_targets(node):
                path = self.paths.get(id(node.value))
                if isinstance(target, ast.Name) and path and (path in KNOWN_MODULES or is_class(path)):
                    self.imported.setdefault(target.id, path)
        return len(self.imported) > known

    def join_path(self, base: ast.AST, attribute: str) -> str | None:
        return f"{self.paths[id(base)]}.{attribute}" if id(base) in self.paths else None

    def find_attribute_by_name(self, node: ast.AST) -> str | None:
        """Return the name of the attribute that getattr or a similar function takes, or None if it is not known."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME[:4]:
            return self.strings.get(id(node.args[1])) if len(node.args) > 1 else None
        return None

    def find_module_by_name(self, node: ast.AST) -> str | None:
        """Return the module that `__import__("x")` imports, or None if an answer may not import it."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "__import__":
            name = self.strings.get(id(node.args[0])) if len(node.args) == 1 and not node.keywords else None
            return name if name in IMPORTS else None
        return None

    def find_plain_uses(self) -> set[int]:
        """Return the ids of nodes where a module may appear: `module.x`, `alias = module`, `getattr(module, "x")`."""
        allowed = set()
        for node in self.nodes:
            names = [target.id for target in list_targets(node) if isinstance(target, ast.Name)]
            if isinstance(node, ast.Attribute) or any(name in self.imported for name in names):
                allowed.add(id(node.value))
            elif self.find_attribute_by_name(node) and node.func.id in ("getattr", "hasattr"):
                allowed.add(id(node.args[0]))
        return allowed

    def list_findings(self) -> Iterator[tuple[int, str, str]]:
        """Yield the line, the name and the reason of each finding, in any order."""
        docstrings = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        called = {id(node.func) for node in self.nodes if isinstance(node, ast.Call)}
        self.imports = {id(node.func) for node in self.nodes if self.find_module_by_name(node)}
        line = 1
        for node in self.nodes:
            line = getattr(node, "lineno", line)
            for name, reason in self.look_at_node(node, docstrings, called):
                yield line, name, reason

    def look_at_node(self, node: ast.AST, docstrings: set[int], called: set[int]) -> Iterator[tuple[str, str]]:
        path = self.paths.get(id(node))
        is_bound_here = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if path in KNOWN_MODULES and id(node) not in self.plain_uses and not is_bound_here:
            yield path, "is a module that is passed on as a value or changed"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from look_at_import(node)
        elif isinstance(node, ast.Name):
            yield from self.look_at_name(node, called)
        elif isinstance(node, ast.Attribute):
            yield from self.look_at_attribute(node.value, node.attr, isinstance(node.ctx, ast.Load))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if (base := self.paths.get(id(node.value))) and not base.endswith(".pg_coalesce_state"):
                yield base, "is changed globally"
        elif isinstance(node, ast.Call):
            yield from self.look_at_call(node)
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                if (name := self.paths.get(id(base))) in BASES:
                    yield name, f"is the base of {BASES[name]}"
        elif type(node).__name__ == "MatchClass":
            for attribute in node.kwd_attrs:
                yield from self.look_at_attribute(node, attribute, True)
        for field in ("name", "asname", "arg", "rest"):
            name = getattr(node, field, None)
            if isinstance(name, str) and SPECIAL.fullmatch(name) and name not in SET:
                yield name, "defines a special name that no answer needs"
        if (value := self.strings.get(id(node))) is not None and id(node) not in docstrings:
            yield from look_at_string(value)

    def look_at_name(self, node: ast.Name, called: set[int]) -> Iterator[tuple[str, str]]:
        name = node.id
        is_read = isinstance(node.ctx, ast.Load)
        if name not in NAMES and SPECIAL.fullmatch(name) and name not in (READ if is_read else SET):
            yield name, INTERNALS if is_read else "sets a special name that no answer needs"
        if name in BUILTINS and is_read:
            yield name, BUILTINS[name]
        elif name in BY_NAME and id(node) not in called:
            yield name, "can take a computed attribute name"
        elif name in NAMES and id(node) not in self.imports:
            yield name, NAMES[name]
        elif name in LIBRARY and name not in self.bound and name not in self.imported:
            yield name, f"{SYSTEM}: a module that this file does not import itself"

    def look_at_attribute(self, base: ast.AST, name: str, is_read: bool) -> Iterator[tuple[str, str]]:
        path = self.join_path(base, name)
        of_self = isinstance(base, ast.Name) and base.id in ("self", "cls")
        if of_self and (name in self.own or name[0] != "_"):
            pass  # the submission's own
        elif name in NAMES:
            yield name, NAMES[name]
        elif SPECIAL.fullmatch(name):
            if name not in READ or not is_read:
                yield name, INTERNALS
        elif path and name.lstrip("_") in LIBRARY - IMPORTS - {"select"}:
            yield path, f"{SYSTEM}: the library's {name.lstrip('_')}, through another module"
        elif name in SYSTEM_MODULES:
            yield name, f"{SYSTEM}: the name of a module"
        elif path and path.startswith("torch.") and name in TORCH_MODULES:
            yield path, "is a part of torch that no answer needs"
        elif path and ".ProcessGroup." in path:
            yield path, "uses the process group class instead of a group"
        elif path and "._world." in path and ".pg_coalesce_state" not in path:
            yield path, INTERNALS
        elif is_private(name) and (path or name not in self.own):
            yield name, "is a private name that this submission does not define"
        if path and not is_read:
            yield path, "is changed globally"
        if not is_read and isinstance(base, ast.Call):
            yield name, "is set on the result of a call, such as the class of another object"

    def look_at_call(self, node: ast.Call) -> Iterator[tuple[str, str]]:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in BY_NAME or (name in BY_NAME[:4] and not isinstance(node.func, ast.Name)):
            return
        if name in ("attrgetter", "methodcaller"):
            attributes = node.args if name == "attrgetter" else node.args[:1]
            base: ast.AST = node
        else:
            attributes, base = node.args[1:2], node.args[0] if node.args else node
        for attribute in attributes or [node]:
            value = self.strings.get(id(attribute))
            if value is None:
                yield name, "takes a computed attribute name"
            else:
                for part in value.split("."):
                    if part:
                        yield from self.look_at_attribute(base, part, name not in ("setattr", "delattr"))


def is_private(name: str) -> bool:
    return name[0] == "_" and name not in PRIVATE and not name.startswith("_foreach_")


def is_class(path: str) -> bool:
    name = path.rpartition(".")[2]
    return name[0].isupper() and not name.isupper()


def list_targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment with a value, or [] for other nodes."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        return [node.target]
    return []


def list_imported_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the names that absolute imports bind, each with the dotted name to which it refers."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def look_at_import(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield each import that is neither in IMPORTS nor one of the course's modules, with the reason."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level:
        top = (node.module or names[0]).partition(".")[0]
        if node.level > 2 or (node.level == 2 and top not in {entry.package for entry in MODULES}):
            yield "." * node.level + (node.module or ""), "is imported from outside the submission"
        return
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    for name in names:
        top, *parts = name.split(".")
        if top not in IMPORTS:
            yield name, NAMES.get(top, "is a module that no answer needs")
            continue
        for part in parts:
            if part == "*":
                yield name, "imports names that this file does not show"
            elif part in NAMES:
                yield name, NAMES[part]
            elif (part.lstrip("_") in LIBRARY - IMPORTS - {"select"}) or part in TORCH_MODULES or is_private(part):
                yield name, "is a part of another module that no answer needs"


def look_at_string(value: str) -> Iterator[tuple[str, str]]:
    """Yield a string that is a suspicious name, or the suspicious names in it that do not look like words."""
    if DOTTED.fullmatch(value):
        for part in value.split("."):
            if part in SYSTEM_MODULES or part in ("eval", "exec"):
                yield f'"{value}"', "is a string with the name of something that no answer needs"
            elif part in NAMES:
                yield f'"{value}"', NAMES[part]
            elif SPECIAL.fullmatch(part) and part not in READ:
                yield f'"{value}"', INTERNALS
        return
    for match in (*IN_TEXT.finditer(value), *SPECIAL.finditer(value)):
        if match[0] not in READ:
            yield match[0], "is named in a string"


def evaluate_string(node: ast.AST, strings: Mapping[int, str]) -> str | None:
    """Return the value of a string made of constants, given the values of its parts, or None if it is not known."""

    def value(part: ast.AST) -> str | None:
        return strings.get(id(part))

    if isinstance(node, ast.Constant):
        return node.value.decode("latin-1") if isinstance(node.value, bytes) else get_string(node.value)
    if isinstance(node, ast.FormattedValue):
        return value(node.value)
    if isinstance(node, ast.JoinedStr):
        return join_strings("", map(value, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return join_strings("", (value(node.left), value(node.right)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and value(node.left) is not None:
        parts = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return fill("%s", value(node.left), [*map(value, parts)])
    if isinstance(node, ast.Subscript) and value(node.value) is not None and is_reversed(node.slice):
        return value(node.value)[::-1]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        text, method, arguments = value(node.func.value), node.func.attr, [*map(value, node.args)]
        if text is None:
            return None
        if method == "format":
            return fill("{}", text, arguments)
        if method == "join" and len(node.args) == 1 and isinstance(node.args[0], (ast.List, ast.Tuple)):
            return join_strings(text, map(value, node.args[0].elts))
        if method in ("lower", "upper", "swapcase", "casefold", "strip") and not arguments:
            return getattr(text, method)()
        if method in ("replace", "removeprefix", "removesuffix", "strip") and None not in arguments:
            return getattr(text, method)(*arguments) if len(arguments) == 1 + (method == "replace") else None
    return None


def get_string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def join_strings(separator: str, parts: Iterator[str | None] | Sequence[str | None]) -> str | None:
    known = list(parts)
    return None if None in known else separator.join(known)


def fill(mark: str, text: str, parts: Sequence[str | None]) -> str | None:
    """Replace each `mark` in the text with the next part. Return None if a part is unknown, missing or unused."""
    pieces = text.split(mark)
    if None in parts or len(pieces) != len(parts) + 1:
        return None
    return "".join(piece + part for piece, part in zip(pieces, [*parts, ""]))


def is_reversed(part: ast.AST) -> bool:
    """Return whether a slice is [::-1]."""
    return isinstance(part, ast.Slice) and part.lower is part.upper is None and isinstance(part.step, ast.UnaryOp)
