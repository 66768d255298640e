"""`brigade bench --entry` and `brigade leaderboard`: the contents of an entry, and the errors for a wrong entry."""

import json
from types import SimpleNamespace

import pytest

from brigade.checks import run
from brigade.cli import lab
from brigade.course.modules import ROOT, CourseError, get_module
from brigade.lab import ladder, leaderboard
from brigade.rank.emulated_link import Link

RATIOS = {"torch DDP": 1.0, "torch DDP + ZeRO": 1.4, "4 BucketedDDP": 0.9, "8 ZeroOptimizer": 0.95}


def make_bench(variants, loss=3.0, real_s=0.01):
    """Return a bench in which the step times are RATIOS in seconds, and module 8 keeps half of the state."""

    def measure(variant):
        marks = [[[0.0, *[RATIOS.get(variant.label, 0.8)] * 4]] * 4] * 2
        state = 500_000 if "Zero" in variant.label else 1_000_000
        kept = {"parameters": 1_000_000, "gradients": 1_000_000, "optimizer state": state}
        peak = kept | {"gradients": 2_000_000}
        return ladder.Measurement(variant.label, marks, [[1.0] * 4] * 2, 4, 3e6, 0, [loss] * 2, kept, peak)

    measurements = [measure(variant) for variant in variants]
    setting = (ladder.EMULATED, 2, "gloo", 3.0, measurements, measure(ladder.COMPUTATION), Link(0.0, 1e9))
    return ladder.Ladder(*setting, backward_s=0.1, real_s=real_s, model_bytes=10**8)


@pytest.fixture
def enter(brigade, monkeypatch, tmp_path):
    """Return a function that enters a submission with modules 1 to 8. The checks and the bench are simulated."""
    monkeypatch.chdir(tmp_path)

    def enter(failed=(), **bench):
        for number in range(1, 9):
            entry = get_module(number)
            (tmp_path / entry.path).parent.mkdir(exist_ok=True)
            (tmp_path / entry.path).write_text((ROOT / "solutions" / entry.path).read_text())
        outcomes = {number: [SimpleNamespace(passed=number not in failed)] for number in range(1, 9)}
        for number, [outcome] in outcomes.items():
            outcome.check = SimpleNamespace(name=f"test_launches_{number}")
        monkeypatch.setattr(run, "run_checks", lambda checks, *_, **__: outcomes[checks[0].module])
        monkeypatch.setattr(lab, "compare", lambda variants, *_: make_bench(variants, **bench))
        return brigade("bench", "--entry", "Ada", "--target", tmp_path)

    return enter


def test_an_entry_contains_the_modules_that_pass(enter, brigade, tmp_path):
    done = enter(failed=[5])
    assert done.returncode == 0 and "entry-Ada.json written" in done.stdout, done
    assert "Module 9 is left out: module 9 is missing." in done.stdout
    assert "Module 5 is left out because it fails these checks: launches_5." in done.stdout
    assert "All checks pass in modules 4, 6, 7, 8." in done.stdout
    entry = leaderboard.read_entry(tmp_path / "entry-Ada.json")
    assert entry.name == "Ada" and entry.cells[:2] == ("0.80 [0.80-0.80] (6)", "3.00 (4)")
    assert entry.cells[2:4] == ("3.50 (8)", "2.50 (8)")
    assert (tmp_path / "entry-Ada.json").stat().st_size < leaderboard.MAX_BYTES
    (tmp_path / "entry-Ada.json").unlink()
    assert "no module passes all its checks" in enter(failed=range(4, 9)).stderr
    assert enter(loss=3.1).returncode == 1
    assert not list(tmp_path.glob("entry*"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--entry", "Ada", "--rounds", 40], "so --rounds cannot be used with it"),
        (["--entry", "Ada", "--comm-ratio", 0.5], "so --comm-ratio cannot be used with it"),
        (["--entry", "Ada", "--save"], "so --save cannot be used with it"),
        (["--entry", ""], "the name of an entry must have 1 to 20 printable characters"),
        (["--entry", "a\nb"], "the name of an entry must have 1 to 20 printable characters"),
    ],
)
def test_settings_are_fixed(brigade, options, sentence):
    done = brigade("bench", *options)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def entry():
    """Return the content of a valid entry with modules 4 and 8."""
    variants = ladder.add_torch_variants([ladder.get_variant(get_module(number)) for number in (4, 8)])
    return json.loads(leaderboard.make_entry("Ada", make_bench(variants), {}))


def change_row(entry, **changes):
    return entry | {"rows": [entry["rows"][0] | changes, *entry["rows"][1:]]}


INVALID = {
    "a list": lambda entry: [1],
    "no rows": lambda entry: entry | {"rows": []},
    "rows of torch only": lambda entry: entry | {"rows": entry["rows"][2:]},
    "a negative number": lambda entry: change_row(entry, sent_mb=-1),
    "an infinite number": lambda entry: change_row(entry, grad_mb=float("inf")),
    "no number": lambda entry: change_row(entry, state_mb="0"),
    "a truth value": lambda entry: change_row(entry, state_mb=True),
    "a long checksum": lambda entry: entry | {"submission": "2" * 100},
    "a terminal's code": lambda entry: entry | {"date": "\x1b[2J"},
}
REFUSED = {
    "its format or its settings": {"ranks": 4},
    "the machine was too slow or too busy": {"real_share": 0.3},
    "1 to 20 printable characters": {"name": "\u202eEve"},
}


@pytest.mark.parametrize("sentence", [*INVALID, *REFUSED])
def test_a_wrong_entry_is_refused_in_one_sentence(entry, sentence, tmp_path):
    path = tmp_path / "entry.json"
    path.write_text(json.dumps(INVALID[sentence](entry) if sentence in INVALID else entry | REFUSED[sentence]))
    usual = "^it is not a file that `brigade bench --entry` wrote$"
    with pytest.raises(CourseError, match=usual if sentence in INVALID else sentence):
        leaderboard.read_entry(path)


def test_entries_of_a_class_are_ranked(brigade, entry, tmp_path):
    """Bob is the fastest, Cleo needs the least memory, and [E]ve is slow."""
    fast, slow = ({"median": ratio, "lower": 0.8, "upper": 1.3} for ratio in (0.85, 1.2))
    people = {
        "ada": entry,
        "bob": change_row(entry, ratio=fast) | {"name": "Bob"},
        "cleo": entry | {"name": "Cleo", "rows": [entry["rows"][0], entry["rows"][1] | {"grad_mb": 0.5}]},
        "eve": change_row(entry, ratio=slow) | {"name": "[E](www.x.y)|<b>"},
    }
    people["eve"]["rows"] = people["eve"]["rows"][:1]
    for name, content in people.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_entry-1.json").write_text(json.dumps(content))
    page = tmp_path / "page.md"
    done = brigade("leaderboard", tmp_path, "--out", page)
    assert done.returncode == 0 and "page.md written" in done.stdout and "[E](www.x.y)|<b>" in done.stdout
    assert max(map(len, done.stdout.split("page.md")[0].splitlines()[:-1])) <= 80
    everyone, problems = leaderboard.read_entries(tmp_path)
    assert problems == [] and [one.name[:4] for one in everyone] == ["Bob", "Ada", "Cleo", "[E]("]
    assert [one.cells[3] for one in everyone] == ["2.50 (8)", "2.50 (8)", "2.00 (8)", "3.00 (4)"]
    name = page.read_text().splitlines()[-1].split(" | ")[0]
    assert name == "| &#91;E&#93;&#40;www&#46;x&#46;y&#41;&#124;&#60;b&#62;"


def test_what_is_no_entry_costs_a_sentence(brigade, entry, tmp_path):
    with pytest.raises(CourseError, match="there is no valid entry in"):
        leaderboard.read_entries(tmp_path)
    (tmp_path / "entry-a.json").write_text(json.dumps(entry))
    later = change_row(entry, sent_mb=1) | {"date": "2030-01-01T00:00:00Z"}
    (tmp_path / "entry-b.json").write_text(json.dumps(later))
    (tmp_path / "entry-c.json").symlink_to(tmp_path / "entry-a.json")
    for name, content in (("d", b"\xff"), ("e", b"[" * 20_000), ("f", b"x" * (leaderboard.MAX_BYTES + 1))):
        (tmp_path / f"entry-{name}.json").write_bytes(content)
    (tmp_path / "measurements.json").write_text("of another command")
    done = brigade("leaderboard", tmp_path)
    assert done.returncode == 0 and "1.00 (4)" in done.stdout, "the last one of a name counts"
    assert done.stdout.splitlines()[-5:] == [
        "entry-b.json: there are several entries with this name; the latest one counts.",
        "entry-c.json was left out: it cannot be read: Too many levels of symbolic links.",
        *(f"entry-{n}.json was left out: it is not a file that `brigade bench --entry` wrote." for n in "def"),
    ]
    assert "there is no directory" in brigade("leaderboard", tmp_path / "nowhere").stderr
