"""List the names in a submission that no answer needs, with file and line, for the instructor.

The text is searched word by word, and nothing is run or parsed. The list changes no score. A name on the list proves
nothing, and an empty list proves nothing either, because a text can hide a name. What a submission cannot do, whatever
it contains, is in `docs/security.md`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
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
DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def look_at(target: Path, entries: Sequence[Module]) -> list[str]:
    """List the names in the modules of `target` that a grading run of `entries` may import, the most telling first."""
    last = max((entry.number for entry in entries), default=0)
    texts, unreadable = read_texts(target, [entry for entry in MODULES if entry.number <= last])
    return [f"{name}: cannot be examined: {reason}" for name, reason in unreadable.items()] + look(texts)


def read_texts(target: Path, entries: Sequence[Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the texts of the modules' files in `target`, and why other files cannot be read, by the files' names."""
    texts: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    for entry in entries:
        if (main := find(target, entry)) is None:
            continue
        for name in entry.paths:
            path = main.with_name(name.name)
            try:
                if path == main or path.exists():
                    texts[str(name)] = read_text(path, target)
            except CourseError as error:
                unreadable[str(name)] = str(error)
    return texts, unreadable


def look(texts: Mapping[str, str]) -> list[str]:
    """List the names in these files with their lines, at most MOST_FINDINGS of them.

    A name that the module's skeleton contains is not listed.
    """
    found = []
    for file, text in texts.items():
        skeleton = ROOT / "lessons" / file
        given = find_names(skeleton.read_text()) if skeleton.is_file() else {}
        for name, lines in find_names(text).items():
            if name not in given:
                shown = ", ".join(map(str, lines[:MOST_LINES])) + ", ..." * (len(lines) > MOST_LINES)
                found.append((ORDER.index(name), f"{file}:{shown}: {name}: {NAMES[name]}"))
        if DIRECTIONS.search(text):
            found.append((-1, f"{file}: contains text directions, so it looks different from what runs"))
    listed = [line for _, line in sorted(found)]
    if len(listed) > MOST_FINDINGS:
        left_out = len(listed) - MOST_FINDINGS + 1
        listed[MOST_FINDINGS - 1 :] = [f"and more: {left_out} other names are worth a look"]
    return listed


def find_names(text: str) -> dict[str, list[int]]:
    """Return the names of NAMES in a text without comments and docstrings, each with its lines."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(remove_docstrings(text).split("\n"), 1):
        words = WORD.findall(normalize(line.partition("#")[0]))
        for word in dict.fromkeys(words):
            if word in NAMES:
                found.setdefault(word, []).append(number)
    return found


def normalize(line: str) -> str:
    """Return a line in the form in which Python compares names (NFKC), letter by letter.

    Of the whole line, the form would take quadratic time if a letter has many accents. No name of NAMES has one.
    """
    return line if line.isascii() else "".join(unicodedata.normalize("NFKC", letter) for letter in line)


def remove_docstrings(text: str) -> str:
    """Return the text without long strings. The number of each line stays the same."""
    return DOCSTRING.sub(lambda match: "\n" * match.group().count("\n"), text)
