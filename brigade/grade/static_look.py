"""List the names in a submission that no answer needs, with file and line, for the instructor.

The text is searched word by word, and nothing is run or parsed. The list changes no score. A name on the list proves
nothing, and an empty list proves nothing either, because a text can hide a name. What a submission cannot do, whatever
it contains, is in `docs/security.md`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import MODULES, ROOT, CourseError, Module
from brigade.course.submission import find, read_text

HEADING = "please look"
MOST_FINDINGS = 20  # for one submission; the last finding gives the number of the others
MOST_LINES = 4  # shown for one name

# The most telling names come first. Only the first findings are shown.
REASONS = {
    "reads the frames of other functions": """_getframe _current_frames currentframe f_back f_globals f_locals
        f_builtins tb_frame gi_frame cr_frame ag_frame __traceback__ settrace setprofile""",
    "accesses the internals of functions, classes or modules": """__globals__ __closure__ __code__ __builtins__ __dict__
        __subclasses__ __mro__ __base__ __bases__ __getattribute__ __loader__ __spec__ cell_contents gc get_objects
        get_referrers get_referents inspect globals vars attrgetter methodcaller CodeType FunctionType LambdaType
        ModuleType as_subclass __torch_function__ __torch_dispatch__ __class__""",
    "runs text as code": """exec eval compile __import__ import_module importlib builtins bltns ForwardRef
        get_type_hints singledispatch singledispatchmethod Timer load_inline run_module run_path collect_env""",
    "accesses files, processes, threads or the interpreter": """os sys open ctypes CDLL subprocess socket threading
        _thread multiprocessing concurrent asyncio signal mmap pathlib shutil tempfile resource fcntl atexit
        faulthandler pythonapi cpp_extension memfd_create""",
    "names a part of the course's toolkit": "brigade scenario _recorder _channel RecordingGroup StrictGroup",
    "changes hooks or functions globally": """hooks_dict_ref _post_accumulate_grad_hooks _backward_hooks overrides
        TorchDispatchMode TorchFunctionMode _python_dispatch register_module_forward_hook
        register_module_forward_pre_hook register_module_full_backward_hook register_optimizer_step_post_hook
        register_optimizer_step_pre_hook""",
    "is torch's own solution": """DataParallel DistributedDataParallel FSDPModule FullyShardedDataParallel Reducer fsdp
        fully_shard replicate ZeroRedundancyOptimizer average_parameters PostLocalSGDOptimizer""",
    "creates a process group or a store": """_get_backend _register_backend register_backend init_process_group
        destroy_process_group split_group ProcessGroupGloo ProcessGroupMPI ProcessGroupNCCL FileStore HashStore
        PrefixStore TCPStore""",
    "makes views or copies where the checks do not count them": """apply_ map_ map2_ frombuffer from_blob from_dlpack
        from_numpy from_file memmap numpy to_dlpack _C""",
    "can hide a name in data": "b64decode base64 codecs decode fromhex maketrans rot13 unhexlify pickle marshal chr",
    "ends the process": "_exit SystemExit KeyboardInterrupt GeneratorExit exit quit",
}
NAMES = {name: reason for reason, names in REASONS.items() for name in names.split()}
ORDER = list(NAMES)
WORD = re.compile(r"[^\W\d]\w*")
DOCSTRING = re.compile(r'""".*?"""' + r"|'''.*?'''", re.DOTALL)
ENCODING = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*(?!utf-?8\b)([-\w.]+)", re.IGNORECASE)  # PEP 263
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
        main = find(target, entry) if entry.number <= last else None
        for name in entry.paths if main else ():
            path = main.with_name(name.name)
            try:
                if path == main or path.exists():
                    texts[str(name)] = read_text(path, target)
            except CourseError as error:
                findings.append(Finding(str(name), (), "", f"cannot be examined: {error}"))
    return findings + look(texts)


def look(texts: Mapping[str, str]) -> list[Finding]:
    """List the findings in these files of one submission, the most telling first, at most MOST_FINDINGS.

    A name that the module's skeleton contains is not listed.
    """
    occurrences: dict[tuple[str, str, str], list[int]] = {}
    for file, text in texts.items():
        skeleton = ROOT / "lessons" / file
        given = {name for name, _, _ in list_names(skeleton.read_text())} if skeleton.is_file() else set()
        for name, reason, number in list_names(text):
            if name not in given:
                occurrences.setdefault((file, name, reason), []).append(number)
    found = [Finding(file, tuple(lines), name, reason) for (file, name, reason), lines in occurrences.items()]
    found.sort(key=lambda finding: ORDER.index(finding.name) if finding.name in NAMES else -1)
    if len(found) > MOST_FINDINGS:
        left_out = len(found) - MOST_FINDINGS + 1
        found[MOST_FINDINGS - 1 :] = [Finding("and more", (), "", f"{left_out} other names are worth a look")]
    return found


def list_names(text: str) -> list[tuple[str, str, int]]:
    """Return the names of NAMES in a text, each with its reason and its line."""
    lines = enumerate(remove_docstrings(text).split("\n"), 1)
    return [(name, reason, number) for number, line in lines for name, reason in find_names(line, number)]


def remove_docstrings(text: str) -> str:
    """Return the text without long strings. The number of each line stays the same."""
    return DOCSTRING.sub(lambda match: "\n" * match.group().count("\n"), text)


def find_names(line: str, number: int) -> list[tuple[str, str]]:
    """Return the names of NAMES in a line without its comment, and whatever makes it hard to read."""
    found = [("text direction", "makes the text look different from what runs")] if DIRECTIONS.search(line) else []
    if number <= 2 and (encoding := ENCODING.match(line)):
        found.append((encoding.group(1), "is an encoding in which the text can mean something else"))
    words = WORD.findall(unicodedata.normalize("NFKC", line.partition("#")[0]))
    return found + [(word, NAMES[word]) for word in dict.fromkeys(words) if word in NAMES]
