"""`brigade bench --entry` and `brigade leaderboard`: the contents of an entry, and the errors for a wrong entry."""

import hashlib
import json

import pytest

from brigade.cli import lab
from brigade.course.listing import list_checks
from brigade.course.modules import ROOT, CourseError, get_module
from brigade.lab import entry as entries
from brigade.lab import ladder, leaderboard
from brigade.lab.bench import Bench
from brigade.rank.emulated_link import Link

RATIOS = {"torch DDP": 1.0, "torch DDP + ZeRO": 1.4, "4 BucketedDDP": 0.9, "8 ZeroOptimizer": 0.95}


def make_bench(variants, loss=3.0, real_s=0.01):
    """Return a bench in which the step times are RATIOS in seconds, and module 8 keeps half of the state."""

    def measure(variant):
        marks = [[[0.0, *[RATIOS.get(variant.label, 0.8)] * 4]] * 4] * 2
        state = 500_000 if "Zero" in variant.label else 1_000_000
        kept = {"parameters": 1_000_000, "gradients": 1_000_000, "optimizer state": state}
        peak = kept | {"gradients": 2_000_000}
        return ladder.Measurement(variant.label, marks, [[1.0] * 4] * 2, 4, 3e6, [loss] * 2, kept, peak)

    measurements = [measure(variant) for variant in variants]
    setting = (ladder.EMULATED, 2, "gloo", 3.0, measurements, measure(ladder.COMPUTATION), Link(0.0, 1e9))
    return Bench(variants, ladder.Ladder(*setting, backward_s=0.1, real_s=real_s, model_bytes=10**8))


@pytest.fixture
def enter(brigade, monkeypatch, tmp_path):
    """Return a function that enters a submission with modules 4 and 8. Its checks and its bench are simulated."""
    monkeypatch.chdir(tmp_path)

    def run(*options, failed=(), **bench):
        for number in range(1, 9):
            entry = get_module(number)
            path = tmp_path / entry.path
            path.parent.mkdir(exist_ok=True)
            path.write_text((ROOT / "solutions" / entry.path).read_text())
        monkeypatch.setattr(entries, "MODULES", (get_module(4), get_module(8), get_module(9)))
        names = {4: ["launches"], 8: ["state", "norm"]}
        monkeypatch.setattr(lab, "find_failed_checks", lambda entry, *_: names[entry.number] * (entry.number in failed))
        monkeypatch.setattr(lab, "compare", lambda variants, *_: make_bench(variants, **bench))
        return brigade("bench", "--entry", "Ada", "--target", tmp_path, *options)

    return run


def read_content(path):
    return json.loads(path.read_text())


def test_an_entry_says_what_was_measured_and_with_what(enter, tmp_path):
    done = enter()
    assert done.returncode == 0, done
    assert "Module 9 is left out: module 9 is missing." in done.stdout
    assert "All checks pass in modules 4, 8." in done.stdout and "entry-Ada.json written" in done.stdout
    content = read_content(tmp_path / "entry-Ada.json")
    path = get_module(4).path
    digest = hashlib.sha256((ROOT / "solutions" / path).read_bytes()).hexdigest()
    assert content["submission"]["m04_bucketed_ddp.bucketed_ddp"] == digest
    assert content["failed_checks"] == {"4": [], "8": []} and content["expected_loss"] == 3.0
    assert {"torch", "python", "cores"} <= content["made_with"].keys() and len(content["course"]) == 64
    line = (tmp_path / "entry-Ada.json").read_text()
    assert line.count("\n") == 1 and len(line) < entries.MAX_BYTES
    read = entries.read_line(line)
    assert (read.name, read.course) == ("Ada", entries.hash_course())
    assert [(result.module, result.ratio.median) for result in read.results] == [
        ("4 BucketedDDP", 0.9),
        ("8 ZeroOptimizer", 0.95),
    ]
    assert [(result.sent_mb, result.peak_mb, result.kept_mb) for result in read.results] == [(3, 4, 3), (3, 3.5, 2.5)]


def test_only_modules_that_pass_all_checks_are_entered(enter, tmp_path):
    done = enter(failed=[8])
    assert "Module 8 is left out because it fails these checks: state, norm." in done.stdout
    content = read_content(tmp_path / "entry-Ada.json")
    assert "8 ZeroOptimizer" not in [row["variant"] for row in content["rows"]]
    assert content["failed_checks"] == {"4": [], "8": ["state", "norm"]}
    (tmp_path / "entry-Ada.json").unlink()
    assert "no module from 4 to 11 passes all its checks" in enter(failed=[4, 8]).stderr
    assert enter(loss=3.1).returncode == 1
    assert not list(tmp_path.glob("entry*"))


def test_the_checks_of_a_module_are_run(tmp_path):
    """Without the file of the module, all its checks fail."""
    failed = lab.find_failed_checks(get_module(4), str(tmp_path), 1)
    assert [f"test_{name}" for name in failed] == [check.name for check in list_checks(get_module(4))]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--entry", "Ada", "--rounds", 40], "so --rounds cannot be used with it"),
        (["--entry", "Ada", "--comm-ratio", 0.5], "so --comm-ratio cannot be used with it"),
        (["--entry", "Ada", "--save"], "so --save cannot be used with it"),
        (["--entry", ""], "the name of an entry must have 1 to 40 printable characters"),
        (["--entry", "a\nb"], "the name of an entry must have 1 to 40 printable characters"),
    ],
)
def test_settings_are_fixed(brigade, options, sentence):
    done = brigade("bench", *options)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


# ---- the leaderboard


@pytest.fixture(scope="module")
def line():
    """Return a valid line with modules 4 and 8."""
    variants = ladder.add_torch_variants([ladder.get_variant(get_module(number)) for number in (4, 8)])
    return entries.make_line("Ada", make_bench(variants), {}, {4: [], 8: []}, [])


def change(line, sign=True, **changes):
    """Return the line with other values, and with a checksum that is right if `sign`."""
    content = json.loads(line) | changes
    return json.dumps(content | ({"checksum": entries.compute_checksum(content)} if sign else {}))


def change_row(line, **changes):
    rows = json.loads(line)["rows"]
    return change(line, rows=[rows[0] | changes, *rows[1:]])


INVALID = {
    "a list": lambda line: "[1]",
    "nesting": lambda line: "[" * 20_000,
    "no rows": lambda line: change(line, rows=[]),
    "rows of torch only": lambda line: change(line, rows=json.loads(line)["rows"][2:]),
    "a module twice": lambda line: change(line, rows=json.loads(line)["rows"][:1] * 2),
    "a negative number": lambda line: change_row(line, sent_mb=-1),
    "an infinite number": lambda line: change_row(line, grad_mb=0).replace('"grad_mb": 0', '"grad_mb": 1e999'),
    "no number": lambda line: change_row(line, state_mb="0"),
    "a truth value": lambda line: change_row(line, state_mb=True),
    "a long version": lambda line: change(line, made_with={"torch": "2" * 100, "python": "3", "cores": 2}),
    "a terminal's code": lambda line: change(line, date="\x1b[2J"),
    "cut off": lambda line: line[:-10],
}


@pytest.mark.parametrize("make", INVALID.values(), ids=INVALID)
def test_a_malformed_line_is_refused_in_one_sentence(line, make):
    with pytest.raises(CourseError, match="^(it is not a line that `brigade bench --entry` wrote|its checksum)"):
        entries.read_line(make(line))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sign": False, "name": "Eve"}, "its checksum does not match"),
        ({"format": 2}, "its format is '2', but this version reads format 1"),
        ({"ranks": 4}, "its settings are not those"),
        ({"real_share": 0.3}, "the machine was too slow or too busy"),
        ({"name": "\u202eEve"}, "printable characters"),
        ({"name": "E" * 41}, "printable characters"),
    ],
)
def test_a_line_that_does_not_count_is_refused_with_the_reason(line, changes, sentence):
    assert entries.read_line(change(line)).name == "Ada"
    with pytest.raises(CourseError, match=sentence):
        entries.read_line(change(line, **changes))


def test_entries_of_a_class_are_ranked(brigade, line, tmp_path):
    """Ada and Bob are equally fast in the table, Cleo needs the least memory, and [E]ve is slow."""
    rows = json.loads(line)["rows"]
    slow = change_row(line, ratio={"median": 1.2, "lower": 1.1, "upper": 1.3}, name="x")
    people = {
        "ada": change(line),
        "bob": change_row(change(line, name="Bob"), ratio={"median": 0.9049, "lower": 0.9, "upper": 1}),
        "cleo": change(line, name="Cleo", rows=[rows[0], rows[1] | {"grad_mb": 0.5}]),
        "eve": change(slow, name="[E](www.x.y)|<b>", rows=json.loads(slow)["rows"][:1]),
    }
    for name, text in people.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_entry-1.json").write_text(text + "\n")
    page = tmp_path / "page.md"
    done = brigade("leaderboard", tmp_path, "--out", page)
    assert done.returncode == 0 and "page.md written" in done.stdout and "[E](www.x.y)|<b>" in done.stdout
    assert max(map(len, done.stdout.split("page.md")[0].splitlines())) <= 80
    everyone, problems = leaderboard.read_entries(tmp_path)
    assert problems == []
    ranks = [
        [(number, entry.name[:4]) for number, entry, _ in leaderboard.rank(everyone, category)]
        for category in leaderboard.CATEGORIES
    ]
    assert ranks[0] == [(1, "Ada"), (1, "Bob"), (1, "Cleo"), (4, "[E](")]
    assert [number for number, _ in ranks[1]] == [1, 1, 1, 1]
    assert ranks[3] == [(1, "Cleo"), (2, "Ada"), (2, "Bob"), (4, "[E](")]
    text = page.read_text()
    assert "| 1 | Cleo | 2.00 | 8 ZeroOptimizer |" in text
    name = next(row for row in text.splitlines() if row.startswith("| 4 |")).split(" | ")[1]
    assert name == "&#91;E&#93;&#40;www&#46;x&#46;y&#41;&#124;&#60;b&#62;"


def test_what_is_no_entry_costs_a_sentence(brigade, line, tmp_path):
    with pytest.raises(CourseError, match="there is no valid entry in"):
        leaderboard.read_entries(tmp_path)
    later = change(line, date="2030-01-01T00:00:00Z", course="another")
    (tmp_path / "entry-a.json").write_text(f"{line}\nnonsense\n{later}\n")
    (tmp_path / "entry-b.json").symlink_to(tmp_path / "entry-a.json")
    (tmp_path / "entry-c.json").write_bytes(b"\xff")
    (tmp_path / "entry-d.json").write_text("x" * (entries.MAX_BYTES + 1))
    (tmp_path / "measurements.json").write_text("of another command")
    done = brigade("leaderboard", tmp_path)
    assert done.returncode == 0 and "2030-01-01" in done.stdout, "the last one of a name counts"
    assert done.stdout.splitlines()[-6:] == [
        "entry-a.json, line 2, was left out: it is not a line that `brigade bench --entry` wrote.",
        "entry-a.json, line 3: the checks or the bench differ from this course's.",
        "entry-a.json, line 3: there are several entries with this name; the latest one counts.",
        "entry-b.json was left out: it cannot be read: Too many levels of symbolic links.",
        "entry-c.json was left out: it is not text.",
        "entry-d.json was left out: it has more than 2000 lines, or a line has more than 50000 characters.",
    ]
    assert "there is no directory" in brigade("leaderboard", tmp_path / "nowhere").stderr
