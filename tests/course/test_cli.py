"""The command line for students: wrong input gets one clear line, and no work of a student is lost."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hang_guard
import pytest

from brigade.course.cli import check, own_work, progress_file
from brigade.course.cli.main import parse
from brigade.course.table import written
from brigade.course.table.modules import MODULES, ROOT, get_module, select_modules
from brigade.course.table.submission import read
from brigade.lab import comparison
from brigade.ranks.runner import options, ranks

COMPARE = check.compare

pytestmark = pytest.mark.usefixtures("few_cases")


@pytest.fixture(autouse=True)
def progress(tmp_path_factory, monkeypatch):
    """Yield a new progress file for every test."""
    path = tmp_path_factory.mktemp("progress") / "progress.json"
    monkeypatch.setattr(progress_file, "PROGRESS", path)
    return path


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch):
    """After a module, measure nothing. The tests about the comparison use `short_comparison`."""
    monkeypatch.setattr(check, "compare", lambda *_: True)


@pytest.fixture
def short_comparison(monkeypatch):
    monkeypatch.setattr(check, "compare", COMPARE)
    monkeypatch.setattr(comparison, "WORKLOAD", replace(comparison.WORKLOAD, rounds=3, warmup=1, batch_size=2, time=16))


@pytest.fixture
def lessons(tmp_path):
    """Return a directory with a correct answer to module 1 only."""
    entry = get_module(1)
    (tmp_path / entry.package).mkdir()
    (tmp_path / entry.path).write_text((ROOT / "solutions" / entry.path).read_text())
    return tmp_path


def remember_pass(lessons):
    """Let `next` find module 1 passed."""
    entry = get_module(1)
    progress_file.remember("passed", entry.package, progress_file.hash_submission(entry, read(lessons, 1)))


def edit(lessons, old, new):
    """Replace the first occurrence of a text in module 1."""
    file = lessons / get_module(1).path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


FINISH = "        for parameter in self.module.parameters():"
ENDLESS = "        import time\n        while True: time.sleep(0.01)\n" + FINISH


REFUSED = [
    ["check", "99"],
    ["check", "three"],
    ["check", "1", "--target", "does/not/exist"],
    ["check", "1", "--target", __file__],
    ["check", "1", "--only", "zebra"],
    ["check", "1", "--until", "1"],
    ["check", "--debug"],
    ["hint", "99"],
    ["reset", "x"],
    ["submit", "--target", "notebooks"],
]


def test_wrong_input_gets_one_line(brigade, snapshot):
    refusals = [brigade(*arguments) for arguments in REFUSED]
    assert all((done.returncode, done.stderr.count("\n")) == (2, 1) for done in refusals)
    snapshot("refusals.check", "".join(done.stderr for done in refusals))


def test_check_passes_and_fails(brigade, lessons):
    done = brigade("check", 1, "--target", lessons)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 of 8 points" in done.stdout
    (lessons / get_module(1).path).write_text((ROOT / "lessons" / get_module(1).path).read_text())
    done = brigade("check", 1, "--target", lessons)
    assert done.returncode == 1
    assert "0 of 8 points" in done.stdout
    assert "part (a)" in done.stdout


def test_prints_are_shown_by_rank_and_capped(brigade, lessons):
    edit(lessons, FINISH, f"        print('hello')\n        print('x' * 500_000)\n{FINISH}")
    shown = brigade("check", 1, "--target", lessons, "--only", "one_all_reduce").stdout
    assert "✓ 1/1" in shown and "[ranks 0, 1] hello" in shown
    assert "hello" not in brigade("check", 1, "--target", lessons).stdout
    edit(lessons, FINISH, "        for parameter in []:")
    done = brigade("check", 1, "--target", lessons, "--only", "gradients_are_averaged")
    assert done.returncode == 1 and "[ranks 0, 1] hello" in done.stdout and len(done.stdout) < 100_000


def test_an_error_in_all_checks_is_shown_once(brigade, lessons):
    edit(lessons, "dist.get_world_size(", "dist.get_wolrd_size(")
    shown = brigade("check", 1, "--target", lessons, "--seed", 3).stdout
    assert shown.count("AttributeError") == 1 and "Check 1.3 (and 1.5, 1.6):" in shown, shown
    assert re.findall(r"Not run: .*(\d\.\d)\.", shown) == ["1.3", "1.3"]  # 1.4 and 1.7 would tell nothing new
    command = f"brigade check 1 --only gradients_are_averaged --seed 3 --target {shlex.quote(str(lessons))}"
    assert f"Repeat:       {command}\n" in shown


def test_after_two_checks_that_hang_no_other_is_waited_for(brigade, lessons, monkeypatch):
    monkeypatch.setitem(options.DEADLINE_S, "gloo", 4.0)
    monkeypatch.setattr(check, "MAX_AT_A_TIME", 1)  # so that the order of the first two is known
    edit(lessons, FINISH, ENDLESS)
    shown = brigade("check", 1, "--target", lessons).stdout
    assert len(re.findall(r"stopped after", shown)) == 1 and re.search(r"rank 0 .*\bfinish\b", shown), shown
    assert shown.count(" 0/") == 5 and shown.count(" Not run: ") == 3 and "2 of 8 points" in shown


def start(*arguments: str) -> subprocess.Popen:
    """Start `brigade` in a separate process, in which no check reaches its deadline. Read its output as it arrives."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", hang_guard.PATIENT, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hang_guard.hear_ctrl_c,
    )


def test_ctrl_c_ends_at_once(lessons):
    """The first two checks pass. The others do not end, so the signal comes before the command has finished."""
    edit(lessons, FINISH, ENDLESS)
    process = start("check", "1", "--target", str(lessons))
    read_until(process, "✓")
    process.send_signal(signal.SIGINT)
    output, _ = hang_guard.communicate(process)  # the ranks' server, which has this pipe, ends too
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in output and " of 8 points" not in output, "it did not end at once"


@pytest.fixture
def submit(brigade, lessons, tmp_path_factory, monkeypatch):
    """Run `brigade submit` in a new directory. Return the zip's files and what was printed after its name."""

    def run():
        monkeypatch.chdir(tmp_path_factory.mktemp("submitted"))
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "run_ranks", lambda *_, **__: pytest.fail("a check ran"))
            done = brigade("submit", "--target", lessons)
        assert done.returncode == 0
        [archive] = Path().glob("submission-*.zip")
        with zipfile.ZipFile(archive) as bundle:
            files = {name: bundle.read(name).decode() for name in bundle.namelist()}
        return files, done.stdout.partition(".zip ")[2]

    return run


def find_numbers(printed, heading):
    """Return the numbers in the line that begins with a heading, or none if there is no such line."""
    return [
        int(number) for line in printed.splitlines() if line.startswith(heading) for number in re.findall(r"\d+", line)
    ]


def test_submit_adds_modules_written_answers_and_measurements(lessons, submit, snapshot):
    """A template that is not filled in is added too, but does not count as an answer."""
    own = get_module(1).path.as_posix()
    files, printed = submit()
    assert list(files) == [own]
    assert find_numbers(printed, "contains") == [1, len(MODULES), 1, 0] and find_numbers(printed, "No passing") == [1]
    entries = select_modules("1-3")
    answers = {f"{entry.package}/answers.md": written.make_template(entry) + "\nMy answer: β.\n" for entry in entries}
    answers[f"{entries[1].package}/answers.md"] = written.make_template(entries[1])
    for name, text in answers.items():
        (lessons / name).parent.mkdir(exist_ok=True)
        (lessons / name).write_text(text)
    content = '{"date": "2026-11-22T08:07:15Z", "rows": [{}]}\n'
    (lessons / "measurements.json").write_text(content)
    files, printed = submit()
    assert files == answers | {own: (lessons / own).read_text(), "measurements.json": content}
    assert find_numbers(printed, "No written answers") == [2, 4, 5, 6, 7, 8]
    assert find_numbers(printed, "Written answers") == [2, 8]
    told = printed.partition("Note: module 2")[0]  # the other modules are missing, too
    snapshot("submit", told.replace(f"of {len(MODULES)} modules", "of (all) modules"))


def test_submit_asks_for_the_answers_of_every_written_module_that_has_questions_with_points(lessons, submit):
    asked = [entry for entry in MODULES if written.count_points([entry])]
    assert {entry.number for entry in asked} > {entry.number for entry in MODULES if not entry.trains and entry.number}
    for entry in MODULES:
        (lessons / entry.package).mkdir(exist_ok=True)
        for path in entry.paths:
            shutil.copy(ROOT / "solutions" / path, lessons / path)
    printed = submit()[1]
    assert find_numbers(printed, "No written answers") == [entry.number for entry in asked]
    assert find_numbers(printed, "Written answers") == [0, len(asked)]
    for entry in asked:
        (lessons / entry.package / "answers.md").write_text(written.make_template(entry) + "\nMy answer: β.\n")
    printed = submit()[1]
    assert find_numbers(printed, "No written answers") == []
    assert find_numbers(printed, "Written answers") == [len(asked), len(asked)]


def test_submit_says_what_is_written_and_passes(lessons, submit):
    """The command runs no check, because it uses the results of `check` and `next` for exactly these files."""
    for entry in MODULES:
        (lessons / entry.package).mkdir(exist_ok=True)
        shutil.copy(ROOT / ("solutions" if entry.number in (1, 2) else "lessons") / entry.path, lessons / entry.path)
    (lessons / get_module(3).path).write_text("def f(:\n")
    remember_pass(lessons)
    files, printed = submit()
    assert find_numbers(printed, "contains") == [len(MODULES), len(MODULES), 2, 1]
    assert find_numbers(printed, "No passing") == [2]
    assert find_numbers(printed, "Not completely") == [e.number for e in MODULES if e.number not in (1, 2, 3)]
    assert find_numbers(printed, "Note: overlapped_ddp.py, ")[:1] == [1]  # the line
    assert "measurements.json" not in files
    file = lessons / get_module(1).path
    file.write_text(file.read_text() + "# another line\n")
    assert find_numbers(submit()[1], "contains")[2:] == [2, 0]


def test_a_change_to_a_module_that_is_not_used_changes_no_result():
    sources = read("solutions", 11)
    assert progress_file.hash_submission(get_module(11), sources) == progress_file.hash_submission(
        get_module(11), sources | {"m10_grad_shards.grad_shards": ("", "x = 1")}
    )


def test_hints_come_one_after_another(brigade):
    seen = [brigade("hint", 1).stdout for _ in range(4)]
    assert len(set(seen[:3])) == 3 and seen[3] == seen[2]
    assert "**(a)**" in seen[0] and "**(b)**" not in seen[0]
    assert brigade("hint", 1, "--again").stdout == seen[0]


def test_hints_are_on_the_first_part_that_is_not_written(tmp_path, monkeypatch, brigade, refuse, snapshot):
    entry = get_module(4)
    shutil.copytree(entry.lesson, tmp_path / "lessons" / entry.package)
    monkeypatch.setattr(own_work, "ROOT", tmp_path)
    file = tmp_path / "lessons" / entry.path
    unwritten = file.read_text()
    file.write_text(re.sub(r"raise NotImplementedError.*part \([ab]\).*", "pass", unwritten))
    shown = brigade("hint", 4).stdout
    assert "**(b), (c)**" in shown and "(a)" not in shown and "(d)" not in shown
    assert "1. Nudge" in brigade("hint", 4, "e").stdout
    unknown = refuse("hint", 4, "z")
    file.write_text(re.sub(r"raise NotImplementedError.*", "pass", unwritten))
    snapshot("refusals.hint", unknown + refuse("hint", 4))


def test_without_torch_one_line_says_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch', name='torch')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "brigade", "check", "1"]
    done = hang_guard.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "make setup" in done.stderr, done.stderr


def test_next_names_the_first_unfinished_module(brigade, lessons, snapshot):
    remember_pass(lessons)
    done = brigade("next", "--target", lessons)
    assert done.returncode == 1
    assert "✓ Module 1" in done.stdout
    snapshot("next.missing", done.stdout)
    shown = brigade("check", 1, 2, "--target", lessons, "--only", "start_equal or one_all_reduce").stdout
    assert "✓ 1/1  1.1" in shown and f"{get_module(2).title}\n  ✗ module 2" in shown


def test_next_does_not_stop_at_an_optional_module(brigade, lessons, snapshot):
    """The warm-up comes first only if it is begun, and even then the next module of the core is named."""
    ring, second = get_module(0), get_module(2)
    for entry in (ring, second):
        (lessons / entry.package).mkdir()
        shutil.copy(ROOT / "lessons" / entry.path, lessons / entry.path)
    remember_pass(lessons)
    shown = brigade("next", "--target", lessons).stdout
    assert "✓ Module 1" in shown and "→ Module 2" in shown and "Module 0" not in shown
    fast = brigade("next", "--target", lessons, "--from", 2, "--prior", "reference").stdout
    assert "Module 1" not in fast and "→ Module 2" in fast and "--prior reference --watch" in fast
    (lessons / get_module(1).path).write_text((ROOT / "lessons" / get_module(1).path).read_text())
    optional = brigade("next", "--target", lessons).stdout
    assert "→ Module 1" in optional
    (lessons / ring.path).write_text((ROOT / "lessons" / ring.path).read_text() + "# begun\n")
    shown = brigade("next", "--target", lessons).stdout
    assert "→ Module 0" in shown
    snapshot("next.optional", f"{optional}\n{shown}")


def test_debug_runs_one_rank_on_this_terminal(lessons):
    edit(lessons, FINISH, "        breakpoint()\n" + FINISH)
    command = [sys.executable, "-m", "brigade", "check", "1", "--debug", "--only", "gradients_are_averaged"]
    command += ["--target", str(lessons)]
    done = hang_guard.run(command, cwd=ROOT, input="p 6 * 7\nc\n", capture_output=True, text=True)
    assert "(Pdb) 42" in done.stdout, done.stdout + done.stderr
    assert "2 of 2 points" in done.stdout


def test_next_does_not_repeat_what_passed(brigade, lessons, monkeypatch):
    assert "✓ Module 1" in brigade("next", "--target", lessons).stdout
    monkeypatch.setattr(check, "check_module", lambda *_, **__: pytest.fail("the checks ran again"))
    assert "✓ Module 1" in brigade("next", "--target", lessons).stdout
    file = lessons / get_module(1).path
    file.write_text(file.read_text() + "# another line\n")
    with pytest.raises(pytest.fail.Exception, match="ran again"):
        brigade("next", "--target", lessons)


@pytest.mark.parametrize("content", ["{", '{"hints": 3, "passed": []}', '{"hints": {"m01_naive_ddp": "x"}}'])
def test_a_damaged_progress_file_does_no_harm(brigade, progress, content):
    progress.write_text(content)
    assert "1. Nudge" in brigade("hint", 1).stdout
    assert "2. Approach" in brigade("hint", 1).stdout


def test_a_finished_module_is_compared_once_with_the_one_before(brigade, lessons, short_comparison):
    entry = get_module(2)
    (lessons / entry.package).mkdir()
    (lessons / entry.path).write_text((ROOT / "solutions" / entry.path).read_text())
    done = brigade("check", 2, "--target", lessons)
    before, after = (re.search(rf"^ *{label} +(.*)$", done.stdout, re.MULTILINE)[1].split()
                     for label in ("1 NaiveDDP", "2 FlatDDP"))  # fmt: skip
    assert (before[0], after[0]) == ("39", "1")  # launches: parameters, dtypes
    assert before[1] == after[1] == "3.48"  # MB sent: the gradients
    copied, new, views, state = -4, -3, -2, -1
    assert (before[copied], after[copied]) == ("0.00", "6.96")  # into the flat tensor and back
    assert (before[new], after[new]) == ("0.00", "3.48")  # the flat tensor
    assert before[views] == "0" and before[state] == after[state] == "3.48"  # momentum
    assert "1 NaiveDDP" not in brigade("check", 2, "--target", lessons).stdout
    assert "brigade next" in done.stdout


def test_a_comparison_with_too_few_steps_counts_and_says_so(lessons, short_comparison, monkeypatch, capfd):
    monkeypatch.setattr(comparison, "WORKLOAD", replace(comparison.WORKLOAD, rounds=20, limit_s=1e-9))
    check.compare(get_module(1), read(lessons, 1))
    printed = capfd.readouterr().out
    counts = re.search(r"^ *1 NaiveDDP +(.*)$", printed, re.MULTILINE)[1].split()
    assert counts[:2] + counts[-4:] == ["39", "3.48", "0.00", "0.00", "0", "3.48"]
    told = " ".join(printed.split())
    assert "1 timed step" in told and "`brigade bench --comm-ratio 0.8`" in told


@pytest.mark.extended
def test_a_comparison_with_the_reference(brigade, tmp_path, short_comparison):
    """The target has no module 2, and module 3 imports nothing from it."""
    package = get_module(3).package
    shutil.copytree(ROOT / "solutions" / package, tmp_path / package)
    assert "2 FlatDDP" in brigade("check", 3, "--target", tmp_path, "--prior", "reference").stdout


def test_the_checks_up_to_a_part(brigade):
    shown = brigade("check", 1, "--target", "solutions", "--until", "b").stdout
    assert re.search(r"\(a\) .* \(b\)", shown) and "2 of 2 points" in shown and "(c)" not in shown


def test_watch_runs_again_after_a_save(lessons):
    """Each run shows all checks under the headings of their parts, and marks those whose result has changed."""
    watched = start("check", "1", "--watch", "--only", "start_equal", "--target", str(lessons))
    with hang_guard.kill_if_it_hangs(watched):
        shown = read_until(watched, "Waiting for a file")
        assert any("2 of 2 points" in line for line in shown)
        numbers = [line.split()[2] for line in shown if "/1 " in line]
        assert numbers == sorted(numbers) and len(numbers) == 2
        file = lessons / get_module(1).path
        right = file.read_text()
        wrong = right.replace("[*module.parameters(), *module.buffers()]", "module.parameters()")
        for text, change, points in [
            (wrong, "(passed before)", "1 of 2"),
            (wrong + "# nothing\n", "", "1 of 2"),
            (right, "(passes now)", "2 of 2"),
        ]:
            saved = file.with_suffix(".saved")
            saved.write_text(text)
            saved.replace(file)  # the command never sees a part of the text
            read_until(watched, "Module 1")
            shown = read_until(watched, "Waiting for a file")
            assert re.findall(r"\((?:passed|passes) \w+\)", "".join(shown)) == [change] * bool(change)
            assert [line.split()[2] for line in shown if "/1 " in line] == numbers, "the order of the checks"
            assert f"  {points} points" in "".join(shown), shown
            assert ("Likely cause:" in "".join(shown)) == (text != right)
        watched.send_signal(signal.SIGINT)
        assert hang_guard.wait(watched) == 130


def test_watch_notices_a_save_at_the_next_look(lessons, monkeypatch):
    """It looks 20 times per second, and notices a save in the same tick of the clock as the one before."""
    file = lessons / get_module(1).path
    before = file.stat()
    pauses, runs = [], []

    def pause(seconds):
        pauses.append(seconds)
        assert len(pauses) <= 3, "the save is not noticed"
        if len(pauses) == 3:
            edit(lessons, FINISH, FINISH + "# saved")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    def check_once(*_):
        runs.append(len(pauses))
        if len(runs) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(check, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(check, "check_once", check_once)
    with pytest.raises(KeyboardInterrupt):
        check.watch([get_module(1)], parse(["check", "1", "--watch", "--target", str(lessons)]))
    assert runs == [0, 3] and pauses == [0.05] * 3


def read_until(process, text):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def test_parsing_imports_what_the_command_needs_and_nothing_else():
    """A command imports torch, pytest, rich, the lab or the grader only if it uses them."""
    program = (
        "import sys\n"
        "from brigade.course.cli.main import parse\n"
        "def imported(*names): return {*names} & {*sys.modules}\n"
        "parse([])\n"
        "assert not imported('torch', 'pytest', 'rich', 'brigade.lab.experiment', 'brigade.grader.formats')\n"
        "parse(['hint', '1'])\n"
        "assert not imported('torch', 'pytest', 'brigade.lab.experiment', 'brigade.grader.formats')\n"
        "parse(['grade', '--submission', 'x'])\n"
        "assert not imported('torch', 'pytest', 'brigade.lab.experiment')\n"
        "parse(['check', '1'])\n"
        "assert not imported('torch', 'brigade.lab.experiment')\n"
        "for words in (['bench'], ['trace', '1'], ['plan']): parse(words)\n"
        "assert not imported('torch')\n"
    )
    hang_guard.run([sys.executable, "-c", program], cwd="/", check=True)


def test_all_commands_are_there_where_nothing_is_installed(tmp_path):
    """A machine that is lent for minutes has torch, but not this course: no metadata of an installation is found."""
    for path in (path for path in Path(pytest.__file__).parents[1].iterdir() if "bucket_brigade" not in path.name):
        (tmp_path / path.name).symlink_to(path)
    command, variables = [sys.executable, "-S", "-m", "brigade", "--help"], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = hang_guard.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert {"check", "bench", "grade"} <= set(done.stdout.split()), done
