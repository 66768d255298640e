"""All packages are installed as requirements.txt pins them, with hashes. Workflows cannot write more than they must."""

import importlib.metadata
import os
import re
import subprocess
import sys

import hang_guard
import pytest
import yaml
from packaging.requirements import Requirement

from brigade.course.table.modules import ROOT
from tools import lock

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PLATFORMS = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]
MACHINES = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9", "sys_platform": system, "extra": ""}
    | {"platform_machine": machine, "os_name": "posix", "platform_system": system.capitalize()}
    for minor in range(10, 15)
    for system, machine in PLATFORMS
]
INSTALLS = re.compile(r"\bpip install\b.*")
# The build of torch from an index whose hashes the lock cannot contain. Only its version is pinned.
OTHER_TORCH = re.compile(r"(--index-url \S+|\$\(FROM_INDEX\)) \"?(\$\(grep -o '\^torch==|torch==)")


def read_lock() -> list[tuple[Requirement, str]]:
    _, entries = lock.read_entries(lock.LOCK.read_text())
    return [(Requirement(text.partition(" \\\n")[0]), text) for _, text in entries]


def read_declared() -> list[Requirement]:
    declared = (ROOT / "pyproject.toml").read_text().partition("\ndependencies")[2].partition("\n[project.scripts]")[0]
    words = re.findall(r'"([\w-]+(?:[>=][^"]*)?)"', declared)
    return [Requirement(word) for word in words if not word.startswith("bucket-brigade")]


def is_needed(requirement, machine):
    return requirement.marker is None or requirement.marker.evaluate(machine)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: "-".join([*machine.values()][1:6:2]))
def test_every_declared_package_has_one_version_on_every_machine(machine):
    pinned = [requirement for requirement, _ in read_lock() if is_needed(requirement, machine)]
    names = [requirement.name for requirement in pinned]
    assert len(names) == len(set(names))
    versions = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in pinned}
    assert not [str(one) for one in read_declared() if not one.specifier.contains(versions.get(one.name, "0"))]


def test_the_lock_contains_what_is_declared_and_needed_with_hashes_and_nothing_else():
    text = lock.LOCK.read_text()
    assert lock.select({requirement.name for requirement in read_declared()}) == text
    direct = {name for name, entry in lock.read_entries(text)[1] if "bucket-brigade (pyproject.toml)" in entry}
    assert direct == {requirement.name for requirement in read_declared()}
    assert "\n--only-binary :all:\n" in text, "building a package would install others, which are not pinned"
    for requirement, entry in read_lock():
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        lines = [line.removesuffix(" \\") for line in entry.splitlines()[1:] if not line.startswith("    #")]
        assert lines and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in lines), requirement


def test_the_simulators_build_finds_its_packages(tmp_path):
    script = (ROOT / "tools" / "gpu_sim" / "build.sh").read_text()
    [path] = re.findall(r'"\$here/(\S+)" \$needed', script)
    [needed] = re.findall(r'^needed="(.*)"$', script, re.MULTILINE)
    command = [sys.executable, ROOT / "tools" / "gpu_sim" / path, *needed.split()]
    printed = hang_guard.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert {*needed.split()} <= {*re.findall(r"^([\w-]+)==", printed, re.MULTILINE)}


def test_nothing_that_an_installed_package_needs_is_missing_from_the_lock():
    """The installed torch can be another version, and its build for CPUs needs fewer packages."""
    here = {"extra": ""}
    pinned = {requirement.name: requirement for requirement, _ in read_lock() if is_needed(requirement, here)}
    for name in pinned:
        if name == "torch" or re.match(r"triton$|cuda-|nvidia-", name):
            continue
        needed = [Requirement(line) for line in importlib.metadata.distribution(name).requires or []]
        names = {re.sub(r"[._-]+", "-", one.name).lower() for one in needed if is_needed(one, here)}
        assert names <= pinned.keys(), name


def test_a_part_of_the_lock_contains_what_its_packages_need():
    names = [name for name, _ in lock.read_entries(lock.select(["pytest"]))[1]]
    assert {"pytest", "pluggy", "iniconfig"} < set(names) and "torch" not in names
    with pytest.raises(SystemExit, match="requirements.txt does not contain nothing-like-it"):
        lock.select(["nothing-like-it"])


def test_make_sets_torch_apart_like_the_package_for_gradescope(tmp_path):
    """With TORCH_INDEX. In the index with builds for CPUs, torch must have a hash; elsewhere, it can have none."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "TORCH_INDEX")}

    def list_commands(*more):
        command = ["make", "-n", "setup", f"BRIGADE_VENV={tmp_path}", *more]
        done = hang_guard.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return [" ".join(line.split()) for line in done.stdout.splitlines()]

    cpu, other = (list_commands(f"TORCH_INDEX=https://a/whl/{name}") for name in ("cpu", "cu126"))
    for line in cpu:
        if line.startswith("awk"):
            hang_guard.run(["sh", "-c", line], cwd=ROOT, check=True)
    made = tuple((tmp_path / name).read_text() for name in ("others.txt", "torch.txt"))
    assert made == lock.set_torch_apart(lock.LOCK.read_text())
    pinned = lock.get_version(made[1])
    from_pypi = list_commands(f"TORCH={pinned}")
    for lines, where in ((cpu, "--index-url https://a/whl/cpu "), (from_pypi, "")):
        assert any(line.endswith(f"--dest {tmp_path}/torch {where}torch=={pinned}") for line in lines)
        assert any(f"--require-hashes -r {tmp_path}/torch.txt" in line for line in lines)
        assert any(f"--require-hashes -r {tmp_path}/cuda.txt" in line for line in lines)
    assert any(line.endswith(f"install --index-url https://a/whl/cu126 torch=={pinned}") for line in other)
    assert any(line.endswith("torch==2.11.0") for line in list_commands("TORCH=2.11.0"))


def test_packages_for_cuda_are_what_remains(tmp_path):
    """`make setup` installs them only if the installed torch needs them."""
    others, torch = lock.set_torch_apart(lock.LOCK.read_text())
    rest = {name for name, _ in lock.read_entries(lock.LOCK.read_text())[1]} - {"torch"}
    rest -= {name for name, _ in lock.read_entries(others)[1]}
    assert rest and all(re.match("triton$|cuda-|nvidia-", name) for name in rest)


def test_hashes_of_torch_for_cpus_are_added_or_kept_but_never_of_another_version(tmp_path, monkeypatch):
    """Their index may be out of reach while the version stays as it is."""
    entry = "torch=={} \\\n    --hash=sha256:{}\n    # via bucket-brigade (pyproject.toml)\n"
    path = tmp_path / "requirements.txt"
    path.write_text("# made by a tool\n" + entry.format("2.0", "aa"))
    monkeypatch.setattr(lock, "LOCK", path)
    answers = {}

    def run_uv(given, *arguments):
        if "--output-file" in arguments:
            path.write_text("# made by a tool\n" + entry.format(given.partition("==")[2], "bb"))
            return ""
        if given in answers:
            return answers[given]
        raise subprocess.CalledProcessError(1, "uv")

    monkeypatch.setattr(lock, "run_uv", run_uv)
    lock.write_lock(None, [])
    assert re.findall(r"sha256:(\w+)", path.read_text()) == ["aa", "bb"]
    with pytest.raises(subprocess.CalledProcessError):
        lock.write_lock("2.1", [])
    answers["torch==2.1+cpu"] = entry.format("2.1+cpu", "cc")
    lock.write_lock("2.1", [])
    assert re.findall(r"sha256:(\w+)", path.read_text()) == ["bb", "cc"]
    assert path.read_text().endswith("# via bucket-brigade (pyproject.toml)\n")


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / "docs" / "platforms.md"], ids=lambda path: path.stem)
def test_actions_are_named_by_their_commit(path):
    """The comment has the version. A checkout leaves no token behind."""
    lines = path.read_text().splitlines()
    used = [number for number, line in enumerate(lines) if re.match(r" *(- )?uses:", line)]
    assert used or path.suffix == ".md"
    for number in used:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", lines[number]), lines[number]
        if "actions/checkout@" in lines[number]:
            assert "persist-credentials: false" in "".join(lines[number + 1 : number + 5]), lines[number]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_that_may_write_runs_no_code_of_packages(path):
    text = path.read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"} and "EXTRA_INDEX" not in text
    for job in workflow["jobs"].values():
        if "write" in job.get("permissions", {}).values():
            steps = str(job["steps"])
            assert not re.search(r"checkout|setup-|make |pip |python", steps), steps
    assert ("release create" in text) == (path.stem == "release")


MAKEFILES = "Makefile", "tools/setup.mk", "tools/student/Makefile"


@pytest.mark.parametrize("name", [*MAKEFILES, ".devcontainer/Dockerfile", "tools/gradescope/setup.sh", *WORKFLOWS])
def test_packages_are_installed_from_the_lock(name):
    """The course itself is installed without others. Only torch from another index has no hash."""
    text = (ROOT / name).read_text()
    text = text.replace("$(PIP)", "pip").replace("$(BIN)/python -m pip", "pip").replace("$(if $(TORCH_INDEX),", "")
    for command in INSTALLS.findall(text):
        apart = "--no-deps --no-build-isolation --editable ." in command or OTHER_TORCH.search(command)
        assert "--require-hashes" in command or apart, command
    images = re.findall(r"^FROM (.*)", text, re.MULTILINE)
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images)
