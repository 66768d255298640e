"""brigade term, mark and oral: a term from one file, with gradings that are recorded instead of run."""

import ast
import csv
import json
import os
import re
import shutil
import stat
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from brigade.course.checks import collect
from brigade.course.checks.outcome import Outcome
from brigade.course.cli import main as cli
from brigade.course.table import listing, written
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.grader import classroom, formats, gradebook, marking, uploads
from brigade.grader.cli import oral
from brigade.grader.outcome import make_empty_grading
from brigade.grader.term import read_term
from brigade.ranks.errors import UserError
from brigade.ranks.texts import prepare_for_ranks
from brigade.ranks.verdict import Verdict

ZONE = timezone(timedelta(hours=1))
DUE = datetime(2027, 2, 7, 23, 59, tzinfo=ZONE)
SECRET = "correct horse battery staple"
ROSTER = """Student,ID,SIS User ID,SIS Login ID
"Points Possible",,,
"Lace, Ada",100,S100,ada
"Kahn, Bob",101,S101,bob
"Meyer, Carl",102,S102,carl
"Nie, Dora",103,S103,dora
"Ohm, Eve",104,S104,eve
"""
HEAD = """title = "Spring 2027"
platform = "canvas"
roster = "roster.csv"
secret = "secret.txt"
"""
WEEK1 = """
[[assignments]]
name = "week1"
modules = "1"
due = 2027-02-07T23:59:00+01:00
late = { percent = 20, days = 7 }
"""
EXTENSION = """
[[extensions]]
student = "S102"
assignment = "week1"
until = 2027-02-10T23:59:00+01:00
"""
CHECKS = [check.name for check in listing.list_checks(get_module(1))]


def record(waiting, request, *, on_finish, **options):
    """Take the place of the graders: a submission has as many points as its module file says in its first line."""
    for student in waiting:
        points = int(next(iter(student.texts.values())).split()[1])
        grading = make_empty_grading([get_module(1)], 1)
        grading.is_seed_secret = grading.finished = True
        result = formats.encode_grading(grading) | {"score": points, "notes": []}
        for check in result["checks"]:
            check["score"] = min(points, check["points"])
            points -= check["score"]
            cause = {"likely_cause": "the broadcast starts from the wrong rank."}
            check |= {"status": "passed"} if check["score"] else {"status": "failed", "verdict": cause}
        student.results.write_text(json.dumps(result))
        student.is_waiting, student.result = False, result
        formats.write(student.made_from, student.fingerprint)
        on_finish(student)


def hand_in(path, points, date=DUE, answers=""):
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("lessons/m01_naive_ddp/naive_ddp.py", f"# {points} points\n")
        if answers:
            bundle.writestr("lessons/m01_naive_ddp/answers.md", answers)
    os.utime(path, (date.timestamp(),) * 2)


@pytest.fixture
def term(tmp_path, monkeypatch):
    """Five students and uploads from Canvas. Return a function that runs a command, which must succeed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classroom, "grade_all", record)
    (tmp_path / "roster.csv").write_text(ROSTER)
    (tmp_path / "term.toml").write_text(HEAD + WEEK1 + EXTENSION, encoding="utf-8-sig")  # as Notepad writes it
    for name, points in (("ada_100_1_a.zip", 3), ("ada_100_2_a-1.zip", 5), ("ada_LATE_100_3_a-2.zip", 8)):
        hand_in(tmp_path / "week1" / name, points)
    hand_in(tmp_path / "week1" / "bob_LATE_101_4_b.zip", 8)
    hand_in(tmp_path / "week1" / "carl_LATE_102_5_c.zip", 8, DUE + timedelta(days=2))
    (tmp_path / "week1" / "dora_103_6_d.rar").write_bytes(b"Rar!")

    def run(*words, status=0):
        assert cli.main(list(words)) == status

    return run


def read(name):
    return {row.get("submission") or row.get("Student"): row for row in read_rows(name)}


def read_rows(name):
    return list(csv.DictReader(Path(name).read_text(encoding="utf-8-sig").splitlines()))


def read_feedback(student):
    """Return what a student reads about all uploads, without the times and the checks."""
    text = Path("week1-feedback", f"{student}.txt").read_text()
    return "\n" + re.sub(r"\nGraded on.*?(?=\nWhat you handed in|\Z)", "", text, flags=re.DOTALL) + "\n"


def list_files(directory):
    return {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in directory.rglob("*")}


# The file


MISTAKES = [
    ('title = "Spring 2027"', 'titel = "x"'),
    ('title = "Spring 2027"\n', ""),
    ('title = "Spring 2027"', "title = 5"),
    ('"canvas"', '"blackboard"'),
    ("[[assignments]]", "[assignments]"),
    ("+01:00\nlate", "\nlate"),
    ("2027-02-07T23:59:00+01:00", "2027-02-07"),
    ("days = 7", "day = 7"),
    ("percent = 20", "percent = 120"),
    ('modules = "1"', 'modules = "0-1"'),
    ('modules = "1"', 'modules = "99"'),
    ('name = "week1"', 'name = "../x"'),
    ('name = "week1"', 'name = "week0-final"'),
    (EXTENSION, WEEK1),
    ('"S102"', '"S999"'),
    ('assignment = "week1"', 'assignment = "week2"'),
    ("2027-02-10T", "2027-02-01T"),
    ("2027-02-10T23:59:00+01:00", "2027-02-10T23:59:00"),
    (EXTENSION, EXTENSION * 2),
    ('secret = "secret.txt"', 'secret = "secret.txt'),
    (WEEK1, f'options = "--bogus"\n{WEEK1}'),
    (WEEK1, f'options = "--limit 0"\n{WEEK1}'),
    (WEEK1, f'options = "--extra \'x"\n{WEEK1}'),
    (WEEK1, f'options = "--modules 3"\n{WEEK1}'),
    (WEEK1, f'options = "--seed 3"\n{WEEK1}'),
    ('"roster.csv"', '"students.csv"'),
]


def test_a_mistake_in_the_file_gets_one_line_with_its_place(term, refuse, tmp_path, snapshot):
    text, lines = HEAD + WEEK1 + EXTENSION, []
    for old, new in MISTAKES:
        assert old in text
        (tmp_path / "term.toml").write_text(text.replace(old, new, 1))
        before = list_files(tmp_path)
        lines.append(refuse("term", "check"))
        assert refuse("term", "grade", "week1") == lines[-1] and list_files(tmp_path) == before
    (tmp_path / "term.toml").write_text(text.replace("S102", "Fox, Fay"))
    (tmp_path / "roster.csv").write_text(ROSTER + '"Fox, Fay",105,S105,fay\n"Fay Fox",106,S106,fay2\n')
    lines.append(refuse("term", "grade", "week1"))
    (tmp_path / "term.toml").write_text("\ufeff" + text, encoding="utf-8")  # as some editors save it
    (tmp_path / "roster.csv").write_text(ROSTER + '"Lace, Ada",105,S100,ada2\n')
    lines.append(refuse("term", "grade", "week1"))
    # The parser's own words depend on the version of Python.
    snapshot("refusals.term", re.sub("(in UTF-8: ).*", r"\1...", "".join(lines)))


# Which upload counts


def hours(number):
    return DUE + timedelta(hours=number)


@pytest.mark.parametrize(
    ("key", "uploaded", "is_marked", "late"),
    [
        ("ada", hours(-1), None, 0),
        ("ada", hours(0), None, 0),
        ("ada", hours(1), None, 20),
        ("ada", hours(7 * 24), None, 20),
        ("ada", hours(7 * 24 + 1), None, 100),
        ("ada", hours(500), False, 0),  # from Canvas: the date of the download
        ("ada", hours(500), True, 20),
        ("carl", hours(71), None, 0),  # an extension of three days
        ("carl", hours(73), None, 20),
        ("carl", hours(3 * 24 + 7 * 24 + 1), None, 100),
        ("carl", hours(71), True, 0),
        ("carl", hours(73), True, 20),  # nobody knows when it came
        ("carl", hours(500), True, 20),  # as for a student without an extension
        ("carl", hours(73), False, 0),
        ("carl", hours(-1).astimezone(timezone.utc), None, 0),
    ],
)
def test_lateness_follows_from_the_time_the_marker_and_the_extension(key, uploaded, is_marked, late, term):
    week1 = read_term(Path("term.toml")).assignments["week1"]
    timing = week1.judge(key, uploaded, is_marked)
    assert timing.late == late and bool(timing.extension) == (key == "carl")
    assert timing.uploaded == ("" if is_marked is not None else str(uploaded.astimezone(ZONE)))


def test_without_a_rule_late_work_does_not_count(term, tmp_path):
    (tmp_path / "term.toml").write_text((HEAD + WEEK1).replace("late =", "# late ="))
    week1 = read_term(Path("term.toml")).assignments["week1"]
    assert [week1.judge("ada", hours(1), marked).late for marked in (None, True)] == [100, 100]


def test_gradescope_says_whose_an_upload_is_and_when_it_came(term, tmp_path):
    directory = tmp_path / "export"
    for number in (9001, 9002):
        (directory / f"submission_{number}").mkdir(parents=True)
        (directory / f"submission_{number}" / "naive_ddp.py").write_text("# 1\n")
    block = """submission_{0}:
  :submitters:
  - :name: Somebody
    :sid: '{1}'
  :created_at: 2027-02-07 {2}
  :history:
  - :id: 1
    :created_at: 2027-01-01 00:00:00 Z
"""
    texts = [block.format(9001, "S100", "22:59:30.123456789 Z"), block.format(9002, "S101", "17:00:00 -06:00")]
    (directory / uploads.METADATA).write_text("---\n" + "".join(texts))
    people = read_term(Path("term.toml")).people
    everyone = classroom.list_students(directory, tmp_path / "x.csv", people=people)
    assert [(s.key, s.uploaded - DUE, s.is_marked) for s in everyone] == [
        ("ada", timedelta(seconds=30), None),
        ("bob", timedelta(minutes=1), None),
    ]


# An assignment from its uploads to the export


def test_an_assignment_is_run_from_the_file(term, tmp_path, capfd, snapshot):
    """Lateness is taken off once, the export has one row for each student, and the secret is in its file only."""
    term("term", "check")
    overview = capfd.readouterr().out
    assert not (tmp_path / "secret.txt").exists()
    (tmp_path / "secret.txt").write_text(f"{SECRET}\n")
    (tmp_path / "secret.txt").chmod(0o600)
    term("term", "grade", "week1", status=1)  # nobody can read Dora's upload
    term("term", "export", "week1")
    canvas = "Student,ID,SIS User ID,SIS Login ID,Section,Module 1\n"
    assert (tmp_path / "week1-canvas.csv").read_text().replace("\r", "").startswith(canvas)
    points = {name: row["Module 1"] for name, row in read("week1-canvas.csv").items()}
    assert points == {
        "Points Possible": "8",
        "Lace, Ada": "5",  # not the late 8
        "Kahn, Bob": "6.4",
        "Meyer, Carl": "8",
        "Nie, Dora": "",
        "Ohm, Eve": "",
    }
    rows = read("week1.csv")
    assert [rows["bob_LATE_101_4_b.zip"][column] for column in ("late", "score", "extension")] == ["20", "8", ""]
    assert rows["carl_LATE_102_5_c.zip"]["extension"] == "2027-02-10 23:59:00+01:00"
    [bob] = [row for row in read_rows("week1-final.csv") if row["student"] == "bob"]
    assert (bob["score"], bob["taken off"]) == ("6.4", "1.6") and "1.6" in bob["note"]
    term("gradebook", "merge", "week1-final.csv", "--keep", "last", "--out", "term.csv")  # at the end of the term
    assert {row["student"]: row["score"] for row in read_rows("term.csv")}["bob"] == "6.4"
    snapshot("term", overview + read_feedback("Kahn, Bob") + read_feedback("Lace, Ada"))
    page = (tmp_path / "week1-feedback" / "Lace, Ada.html").read_text()
    text = re.sub("</?b>", "", page)
    assert all(line in text for line in read_feedback("Lace, Ada").splitlines())
    assert re.findall('<p class="score">(.*?)<br>', page) == ["<b>5</b> of 8 points count"], "one number is large"
    printed = capfd.readouterr()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("secret.txt", ".secret")]
    assert SECRET not in printed.out + printed.err
    assert not any(SECRET.encode() in path.read_bytes() for path in files)


def test_the_best_upload_counts_after_what_lateness_takes_off(term, tmp_path):
    (tmp_path / "term.toml").write_text((HEAD + WEEK1).replace("late =", 'counts = "best"\nlate ='))
    term("term", "grade", "week1", status=1)
    term("term", "export", "week1")
    assert read("week1-canvas.csv")["Lace, Ada"]["Module 1"] == "6.4"


def test_moodle_gets_one_identifier_and_the_grades(term, tmp_path):
    (tmp_path / "term.toml").write_text((HEAD + WEEK1).replace('"canvas"', '"moodle"'))
    term("term", "grade", "week1", status=1)
    term("term", "export", "week1")
    assert read_rows("week1-moodle.csv")[:2] == [
        {"ID number": "S100", "Module 1": "5"},
        {"ID number": "S101", "Module 1": "6.4"},
    ]
    assert len(read_rows("week1-moodle.csv")) == 5


def test_the_secret_is_drawn_once_and_only_its_owner_reads_it(term, refuse, tmp_path, capfd):
    for _ in range(2):
        term("term", "grade", "week1", status=1)
        path = tmp_path / "secret.txt"
        secrets = {path.read_text().strip(), (tmp_path / "week1.csv.results" / ".secret").read_text()}
        assert len(secrets) == 1 and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert "chmod 600" in refuse("term", "grade", "week1")
    path.write_text("\n")
    term("term", "check", status=2)
    assert "secret.txt" in capfd.readouterr().err


def test_under_sudo_the_user_can_open_everything_but_secrets(term, tmp_path, monkeypatch):
    """What a page or a command tells a person to open belongs to that person, not to root."""
    given = set()
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "4321")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.add((os.stat(path).st_ino, uid, gid)))
    term("term", "grade", "week1", status=1)
    for action in ("report", "export"):
        term("term", action, "week1")
    term("mark", "week1")
    own = ["week1.csv", "week1-adjustments.csv", "week1-feedback", *(tmp_path / "week1-feedback").iterdir()]
    own += ["week1-report.html", "week1-mark-1.html", "week1-canvas.csv", "week1-final.csv"]
    for path in own:
        assert ((tmp_path / path).stat().st_ino, 1234, 4321) in given, path
    closed = ("secret.txt", "week1.csv.results", "week1.csv.results/.secret")
    assert not {(tmp_path / name).stat().st_ino for name in closed} & {number for number, *_ in given}
    monkeypatch.delenv("SUDO_UID")
    given.clear()
    term("term", "report", "week1")
    assert not given, "a container's root keeps its files"


def test_an_interrupted_grading_loses_nothing_and_a_second_run_gives_the_same_file(term, tmp_path, monkeypatch):
    term("term", "grade", "week1", status=1)
    complete = (tmp_path / "week1.csv").read_bytes()
    term("term", "grade", "week1", status=1)
    assert (tmp_path / "week1.csv").read_bytes() == complete and (tmp_path / "week1-adjustments.csv").exists()
    shutil.rmtree(tmp_path / "week1.csv.results")
    (tmp_path / "week1.csv").unlink()
    graded = []

    def interrupt(waiting, request, **options):
        record(waiting[:2], request, **options)
        graded.append(len(waiting))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(classroom, "grade_all", interrupt)
        term("term", "grade", "week1", status=130)
    monkeypatch.setattr(
        classroom, "grade_all", lambda waiting, *a, **o: graded.append(len(waiting)) or record(waiting, *a, **o)
    )
    term("term", "grade", "week1", status=1)
    assert graded == [5, 3] and (tmp_path / "week1.csv").read_bytes() == complete


def adjust(*rows):
    """Write adjustments as a person does. The first row has the columns."""
    Path("week1-adjustments.csv").write_text("\n".join(rows) + "\n", encoding="utf-8-sig")


def test_what_a_person_wrote_counts_and_is_on_the_pages(term, refuse, tmp_path, snapshot):
    term("term", "grade", "week1", status=1)
    columns = "student,late,comment,module 1,comment 1,adjustment"
    rows = ["bob,0,Well done.,,,-2", 'S102,,,7,See line 3.,"-3"']
    adjust(columns, *rows)
    before = Path("week1-adjustments.csv").read_bytes()
    term("term", "grade", "week1", status=1)
    term("term", "export", "week1")
    assert Path("week1-adjustments.csv").read_bytes() == before
    points = {name: row["Module 1"] for name, row in read("week1-canvas.csv").items()}
    assert (points["Kahn, Bob"], points["Meyer, Carl"]) == ("8", "7")
    added = {name: row["Adjustment week1"] for name, row in read("week1-canvas.csv").items() if row["Adjustment week1"]}
    assert added == {"Points Possible": "0", "Kahn, Bob": "-2", "Meyer, Carl": "-3"}
    told = []
    for late in ("yes", "120"):
        adjust("student,late", f"bob,{late}")
        told.append(refuse("term", "export", "week1"))
    snapshot("term.corrected", "".join(told) + read_feedback("Kahn, Bob") + read_feedback("Meyer, Carl"))


def test_pages_of_namesakes_are_named_by_more_than_their_names(term, tmp_path):
    """A page never becomes another student's, in whatever order they hand in."""
    (tmp_path / "roster.csv").write_text(ROSTER + '"Kim, Min",109,S109,u109\n"KIM, Min",110,S110,u110\n')
    for student in (109, 110):
        hand_in(tmp_path / "week1" / f"kimmin_{student}_{student}_k.zip", student - 104)
        term("term", "grade", "week1", status=1)
    names = {path.stem for path in (tmp_path / "week1-feedback").glob("K*.html")}
    assert names == {"Kahn, Bob", "Kim, Min (u109)", "KIM, Min (u110)"}
    assert "\n5 of 8 points" in read_feedback("Kim, Min (u109)") and "\n6 of 8" in read_feedback("KIM, Min (u110)")


def test_the_report_says_what_an_instructor_needs(term, refuse, tmp_path, snapshot):
    refusal = refuse("term", "report", "week1")
    hand_in(tmp_path / "week1" / "stranger.zip", 1)
    term("term", "grade", "week1", status=1)
    term("term", "report", "week1")
    page = (tmp_path / "week1-report.html").read_text()
    text = re.sub(r"\s*\n\s*", "\n", re.sub(r"<[^>]*>", " ", page.partition("<main>")[2]))
    for check in listing.list_checks(get_module(1)):
        text = text.replace(check.title, "(title)")
    snapshot("term.report", refusal + text)
    assert "http" not in page.replace("http-equiv", "")  # it loads nothing
    again = page
    term("term", "report", "week1")
    assert (tmp_path / "week1-report.html").read_text() == again
    # A person can give points for an upload that nobody can read.
    assert "<h2>Unreadable uploads: 1</h2>" in page
    adjust("student,module 1", "dora,6")
    term("term", "grade", "week1", status=1)
    term("term", "report", "week1")
    page = (tmp_path / "week1-report.html").read_text()
    assert "Unreadable" not in page and "<h2>Graded by hand: 1</h2>\n<ul><li>Nie, Dora</li>" in page


def test_a_report_is_written_although_nobody_could_be_graded(term, tmp_path):
    for path in (tmp_path / "week1").glob("*.zip"):
        path.unlink()
    term("term", "grade", "week1", status=1)
    term("term", "report", "week1")
    assert re.search(r"\b0 of 5\b", (tmp_path / "week1-report.html").read_text())


# Written answers

ANSWERS = """# Module 1: written answers

## Question 1 (derive, 2 points)

> Two ranks?

The weights are 1/6 and 1/10.

## Question 2 (explain, 1 point)

> All K parameters?


## Question 3 (explain, 1 point)
An answer </script> without the question.
## Question 4 (derive, 2 points)

> In a ring?
> With a second line, which is not in the course's file.

{}
"""


def read_page(name):
    """Return the data of a page, which are on one line of it."""
    return json.loads(re.search(r"^const data = (.*);$", Path(name).read_text(), re.MULTILINE)[1])


def save_marks(name, page, marks):
    """Write the file that a page saves, with points for some answers."""
    given = {name: {"points": points, "comment": comment, "items": []} for name, (points, comment) in marks.items()}
    Path(name).write_text(json.dumps({"title": page["title"], "all": page["all"], "marks": given}))


@pytest.fixture
def marked(term, tmp_path):
    """A class in which Ada, with her last upload in time, and Bob have answers. Return the command's function."""
    (tmp_path / "secret.txt").touch(0o600)
    (tmp_path / "secret.txt").write_text(f"{SECRET}\n")
    hand_in(tmp_path / "week1" / "ada_100_2_a-1.zip", 5, answers=ANSWERS.format("It takes 21.6 ms."))
    hand_in(tmp_path / "week1" / "bob_LATE_101_4_b.zip", 8, answers=ANSWERS.format("No idea, says Bob."))
    term("term", "grade", "week1", status=1)
    return term


def test_questions_have_the_items_of_their_rubric():
    for entry in MODULES:
        tasks = written.list_tasks([entry])
        assert [task["points"] for task in tasks] == [q.points for q in written.list_questions(entry) if q.points]
        for task in tasks:
            assert sum(points for points, _ in task["rubric"]) == task["points"]
            assert not entry.is_core or (task["model"] and all(text for _, text in task["rubric"]))
    first = written.list_tasks([get_module(1)])[0]
    assert [points for points, _ in first["rubric"]] == [1, 1] and "Rubric" not in first["model"]


def test_a_page_is_anonymous_and_has_some_answers_twice(marked, tmp_path):
    marked("mark", "week1")
    page, text = read_page("week1-mark-1.html"), (tmp_path / "week1-mark-1.html").read_text()
    once = [answer for answer in page["answers"] if not answer["id"].endswith(marking.AGAIN)]
    assert len(once) == 6 and len(page["answers"]) == 9  # two students and three answers; one of each two twice
    assert "</script> without" not in text and "An answer </script> without the question." in str(page["answers"])
    for private in ("ada", "Lace", "bob_", "Kahn", "S100", (tmp_path / "secret.txt").read_text().strip()):
        assert private not in json.dumps(page), private
    order = [answer["task"] for answer in page["answers"]]
    assert order == sorted(order)  # question by question
    marked("mark", "week1", "--markers", "2")
    pages = [read_page(f"week1-mark-{number}.html") for number in (1, 2)]
    places = {answer["id"]: page["marker"] for page in pages for answer in page["answers"]}
    again = [name for name in places if name.endswith(marking.AGAIN)]
    assert {*places} == {*page["all"]} and all(places[name] != places[name[:-2]] for name in again)


def test_marks_become_points_and_a_comment_in_the_gradebook(marked, tmp_path, capfd, snapshot):
    marked("mark", "week1")
    page = read_page("week1-mark-1.html")
    points = {answer["id"]: (1, "") for answer in page["answers"]}
    [bobs] = [one["id"] for one in page["answers"] if "Bob" in one["text"] and not one["id"].endswith(marking.AGAIN)]
    twice = next(one for one in points if one.endswith(marking.AGAIN))
    points |= {bobs: (0, "see the reading"), twice: (0, "")}
    save_marks("part.json", page, {name: mark for name, mark in points.items() if name != bobs})
    capfd.readouterr()
    marked("gradebook", "marks", "week1.csv", "part.json")
    printed = capfd.readouterr().out
    save_marks("all.json", page, points)
    marked("gradebook", "marks", "week1.csv", "all.json")
    rows = read("week1.csv")
    assert [rows[name]["written 1"] for name in ("ada_100_2_a-1.zip", "bob_LATE_101_4_b.zip")] == ["3", "2"]
    sums = [(rows[name]["score"], rows[name]["max"]) for name in ("ada_100_2_a-1.zip", "bob_LATE_101_4_b.zip")]
    assert sums == [("8", "14"), ("10", "14")], "a person who corrects a score now sees what it contains"
    comment = "By question: 1: 1 of 2; 2: 0 of 1 (no answer); 3: 1 of 1; 4: 0 of 2 (see the reading)"
    assert rows["bob_LATE_101_4_b.zip"]["comment 1"] == comment and rows["ada_100_1_a.zip"]["written 1"] == ""
    marked("term", "grade", "week1", status=1)
    marked("term", "export", "week1")
    canvas = read("week1-canvas.csv")
    assert [canvas[name]["Written 1"] for name in ("Points Possible", "Lace, Ada", "Kahn, Bob")] == ["6", "3", "1.6"]
    # An upload may have another name by now, or the file may belong to another week.
    save_marks("strange.json", {"title": "week1", "all": ["x", *points]}, points)
    capfd.readouterr()
    marked("gradebook", "marks", "week1.csv", "strange.json")
    snapshot("term.marks", printed + capfd.readouterr().out + read_feedback("Lace, Ada"))
    save_marks("week2.json", {"title": "week2", "all": ["x"]}, {"x": (1, "")})
    marked("gradebook", "marks", "week1.csv", "week2.json", status=2)
    # Later marks replace earlier ones, and what a person wrote replaces marks, also if an upload is graded again.
    adjust("submission,written 1", "bob_LATE_101_4_b.zip,4")
    points |= {
        name: (0, "") for name in points if name.removesuffix(marking.AGAIN) == twice.removesuffix(marking.AGAIN)
    }
    save_marks("all.json", page, points)
    marked("gradebook", "marks", "week1.csv", "all.json")
    hand_in(tmp_path / "week1" / "ada_100_2_a-1.zip", 6, answers=ANSWERS.format("It takes 21.6 ms."))
    marked("term", "grade", "week1", status=1)
    rows = {row.submission: row for row in gradebook.read_gradebook(tmp_path / "week1.csv")[0]}
    assert rows["bob_LATE_101_4_b.zip"].score == 12
    assert rows["ada_100_2_a-1.zip"].numbers["written 1"] in (2, 3) and rows["ada_100_2_a-1.zip"].score > 7
    assert list((tmp_path / "week1.csv.results" / "backups").iterdir())


def test_marks_that_do_not_fit_change_nothing(marked, refuse, tmp_path, snapshot):
    marked("mark", "week1")
    page = read_page("week1-mark-1.html")
    save_marks("too_many.json", page, dict.fromkeys(page["all"], (9, "")))
    save_marks("other_class.json", {"title": "week1", "all": ["x"]}, {"x": (1, "")})
    Path("no_marks.json").write_text("[1]")
    before = (tmp_path / "week1.csv").read_bytes()
    names = ("too_many.json", "other_class.json", "no_marks.json")
    refusals = [refuse("gradebook", "marks", "week1.csv", name) for name in names]
    assert (tmp_path / "week1.csv").read_bytes() == before
    snapshot("refusals.marks", "".join(refusals))


# Oral exams

CODE = '''"""A module."""
import torch

class Wrapper:
    """A class."""

    def start(self, values):
        """A docstring."""
        total = sum(values)
        self.total = total; self.done = True
        self.handles.append(
            total
        )
        for value in values:
            value += 1
            if not value:
                continue
        given = 1
        return total
'''


def test_a_students_own_statements_are_listed_and_removed(tmp_path):
    entry = SimpleNamespace(lesson=tmp_path)
    (tmp_path / "wrapper.py").write_text("def start():\n    given = 1\n")
    found = oral.list_statements(CODE, Path("m01/wrapper.py"), entry)
    assert found == [(9, 9), (11, 13), (15, 15), (17, 17), (19, 19)]
    for first, last in found:
        changed = oral.remove(CODE, first, last)
        ast.parse(changed)
        assert len(changed.splitlines()) == len(CODE.splitlines()) and changed != CODE


@pytest.fixture
def known_checks(monkeypatch):
    """Replace running a check: one fails without `all_reduce`, both without a division or `zeros_like`."""

    def run(check, snapshot, conditions, sources):
        text = sources["m01_naive_ddp.naive_ddp"][1]
        error = "TypeError" if "torch.zeros_like" not in text else ""
        is_right = "dist.all_reduce(" in text or check.number == "1.1"
        if not error and is_right and "grad /=" in text:
            return Outcome(check, "passed")
        return Outcome(check, "failed", Verdict("an average", "nothing", error=error))

    monkeypatch.setattr(oral, "run_check", run)
    monkeypatch.setattr(oral, "collect", lambda entries: [*listing.list_checks(entries[0])][:2])


def test_a_sheet_names_a_line_that_a_check_needs(known_checks, tmp_path, snapshot):
    shutil.copytree(ROOT / "solutions" / "m01_naive_ddp", tmp_path / "m01_naive_ddp")
    for seed in (3, 4):
        first, again = ([*oral.find_questions(tmp_path, [get_module(1)], seed)] for _ in range(2))
        assert first == again
        [question] = first
        lines = question.text.splitlines()[question.first - 1 : question.last]
        assert "dist.all_reduce" in "\n".join(lines)  # and no line without which all checks fail, or raise an exception
        sheet = oral.format_sheet("ada.zip", first, seed)
        assert f"> {question.first:>4}  {lines[0]}" in sheet and "   def finish_grad_sync(self)" in sheet
        assert [outcome.check.number for outcome in question.failed] == ["1.2"]
        assert sheet.count(f"--seed {seed}") == 2
        snapshot("oral", sheet.partition("   Answer")[2].replace(f"--seed {seed}", "--seed (seed)"))


def test_a_sheet_comes_from_running_the_students_code(refuse, tmp_path, capfd, monkeypatch):
    """The check that it names passes, and fails without the line."""
    monkeypatch.setattr(oral, "collect", lambda entries: collect.collect(entries)[1:3])
    package = tmp_path / "ada" / "m01_naive_ddp"
    shutil.copytree(ROOT / "solutions" / "m01_naive_ddp", package)
    assert cli.main(["oral", str(tmp_path / "ada"), "--seed", "3"]) == 0
    sheet = capfd.readouterr().out
    number, name = int(re.search(r"> +(\d+)", sheet)[1]), re.search(r"--only (\w+)", sheet)[1]
    check = ["check", "1", "--only", name, "--seed", "3", "--target", str(tmp_path / "ada")]
    assert f"run: brigade {' '.join(check)}\n" in sheet
    assert cli.main(check) == 0
    file = package / "naive_ddp.py"
    file.write_text(oral.remove(file.read_text(), number, number))
    assert cli.main(check) == 1
    (package / "naive_ddp.py").write_text("def f(:\n")
    refuse("oral", tmp_path / "ada")


# Checks of an instructor's own

EXTRA = '''import pytest
from helpers import training

from brigade.course.checks.expectations import expect_gradients

MODULE = 1


@pytest.mark.points(2)
def test_five_ranks(submission):
    """On five ranks, every gradient is the average over the ranks."""
    case = submission.case("Plain", world_size=5)
    jobs = case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP")
    expect_gradients(submission.run(training.train, jobs, world_size=5), case)
'''


@pytest.fixture
def extra(tmp_path):
    path = tmp_path / "my_checks.py"
    path.write_text(EXTRA)
    yield path
    listing.set_extra([])


def test_an_instructors_check_counts_and_ranks_do_not_get_its_text(extra, refuse, tmp_path):
    out = tmp_path / "results.json"
    command = ["grade", "--submission", str(ROOT / "solutions"), "--modules", "1", "--extra", str(extra)]
    listing.set_extra([extra])
    assert gradebook.count_points([get_module(1)]) == 10
    [check] = [check for check in collect.collect([get_module(1)]) if check.file]
    assert (check.number, check.points, check.name) == ("1.8", 2, "test_five_ranks")
    assert prepare_for_ranks({"my_checks": (str(extra), EXTRA)}, {})["my_checks"][1] == ""
    state = make_empty_grading([get_module(1)], 1)
    for visibility in (None, "after_due_date"):
        state.visibility = visibility
        shown = json.loads(formats.format_gradescope(state))
        assert [test.get("visibility") for test in shown["tests"]] == [None] * 7 + [visibility]
        assert ("0 of 10 points" in shown["output"]) == (visibility is None)
    listing.set_extra([])
    state = make_empty_grading([get_module(1)], 1)
    state.visibility = "hidden"
    assert {test["visibility"] for test in json.loads(formats.format_gradescope(state))["tests"]} == {"hidden"}
    refusal = refuse(*command, "--visibility", "hidden", "--format", "json", "--out", out)
    assert "--visibility" in refusal and "--format gradescope" in refusal and not out.exists()


def test_an_instructors_check_runs(extra):
    listing.set_extra([extra])
    from brigade.course.checks.context import Conditions
    from brigade.course.checks.run import run_check

    [check] = [check for check in collect.collect([get_module(1)]) if check.file]
    assert run_check(check, "solutions", Conditions(1)).passed
    assert not run_check(check, "lessons", Conditions(1)).passed


UNUSABLE = [
    ("MODULE = 1", ""),
    ("MODULE = 1", "MODULE = 99"),
    ("@pytest.mark.points(2)", ""),
    ("test_five_ranks", "test_subgroups"),
    ("test_five_ranks", "five_ranks"),
    ("def ", "def def "),
]


def test_a_file_without_usable_checks_gets_one_line(extra, snapshot):
    listing.set_extra([extra])
    lines = []
    before = [*listing.EXTRA]
    for old, new in UNUSABLE:
        extra.write_text(EXTRA.replace(old, new))
        with pytest.raises(UserError) as caught:
            listing.set_extra([extra])
        lines.append(f"{caught.value}\n")
        assert before == listing.EXTRA and lines[-1].count("\n") == 1
    snapshot("refusals.extra", "".join(lines))
