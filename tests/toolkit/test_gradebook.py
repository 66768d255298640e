"""Gradebooks of a term: the roster, merging, and the files for Canvas and Moodle. No submission is graded here."""

import csv

import pytest

from brigade.cli import main as cli
from brigade.course.modules import CourseError, get_module
from brigade.grade import classroom, gradebook, roster

HAND_MADE = "key,name,email,section\nteam1,Ada L,=ada@x.org,A\n,Jane Doe,jane@x.org,B\n,Carl M,carl@x.org,B\n"
CANVAS = (
    "Student,ID,SIS User ID,SIS Login ID,Section,Module 1 (77)\n    Points Possible,,,,,8\n"
    '"Doe, Jane",12345,S2,jane,B,\n"Student, Test",99,,test,B,\n'
)
MOODLE = "\ufeffFirst name;Last name;ID number;Email address\nJane;Doe;S2;jane@x.org\n"
GERMAN = "Vorname,Nachname,Matrikelnummer\nJo\u0308rg,Müller,S4\n"  # one umlaut is two characters (NFD)
WORKSHEET = (  # Moodle's grading worksheet
    "Identifier,Full name,Email address\nParticipant 11,Jane Doe,jane@x.org\nParticipant 12,Jane Doe,doe@x.org\n"
)
BLIND = "Identifier\nParticipant 11\nParticipant 12\n"


@pytest.fixture
def read(tmp_path):
    def read_roster(text):
        (tmp_path / "roster.csv").write_text(text)
        return roster.read_roster(tmp_path / "roster.csv")[0]

    return read_roster


@pytest.mark.parametrize(
    ("text", "submission", "key"),
    [
        (HAND_MADE, "Team1", "team1"),
        (HAND_MADE, "Jane Doe_98765_assignsubmission_file", "jane@x.org"),
        (HAND_MADE, "jane@x.org", "jane@x.org"),
        (HAND_MADE, "Jane", None),
        (HAND_MADE, "jane_doe", "jane@x.org"),
        (CANVAS, "doejane_12345_678_submission", "jane"),
        (CANVAS, "doejane_LATE_12345_678_submission", "jane"),
        (CANVAS, "12345_x", None),
        (CANVAS, "doejane_99999_678_submission", None),  # the numbers differ
        (HAND_MADE, "doejane_1_2_submission", "jane@x.org"),
        (GERMAN, "mu\u0308llerjo\u0308rg_LATE_1_2_submission", "S4"),
        (WORKSHEET, "doejane_1_2_submission", None),
        (MOODLE, "Jane Doe_1_assignsubmission_file", "jane@x.org"),
        (MOODLE, "S2", "jane@x.org"),
        (GERMAN, "J\u00f6rg Mu\u0308ller_98765_assignsubmission_file", "S4"),
        (WORKSHEET, "Jane Doe_12_assignsubmission_file", "doe@x.org"),
        (WORKSHEET, "Jane Doe_13_assignsubmission_file", None),
        (WORKSHEET, "Bob_12_assignsubmission_file", None),
        (WORKSHEET, "Participant_11_assignsubmission_file", "jane@x.org"),
        (BLIND, "Participant_12_assignsubmission_file", "Participant 12"),
    ],
)
def test_a_submission_is_found_in_the_roster(text, submission, key, read):
    person = roster.find_person(submission, read(text))
    assert (person and roster.get_key(person)) == key


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_roster_is_unicode_and_its_unused_columns_are_named(encoding, tmp_path):
    (tmp_path / "roster.csv").write_text("Vorname\tGröße\tE-Mail\nJörg\t40\tj@x.org\n", encoding=encoding)
    if encoding == "cp1252":
        with pytest.raises(CourseError, match="is not a CSV file in UTF-8 .* save it as 'CSV UTF-8'"):
            roster.read_roster(tmp_path / "roster.csv")
        return
    [person], ignored = roster.read_roster(tmp_path / "roster.csv")
    assert (person["name"], person["email"], ignored) == ("Jörg", "j@x.org", ["größe"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("email\na@x.org\nA@x.org\n", "two students have the email a@x.org"),
        ("name\nJane\nJane\n", "two students have the name jane, so the grader cannot tell them apart"),
        ("shoe size\n40\n", "has no students; its columns are shoe size, and the grader needs one such as key, login"),
    ],
)
def test_what_is_no_roster_is_refused(text, line, read):
    with pytest.raises(CourseError, match=line):
        read(text)


def test_a_gradebook_gets_the_rosters_columns(read, tmp_path):
    (tmp_path / "class" / "eve").mkdir(parents=True)
    for name in ("jane@x.org.zip", "team1.zip"):
        (tmp_path / "class" / name).touch()
    people = read(HAND_MADE)
    everyone = classroom.list_students(tmp_path / "class", tmp_path / "grades.csv", people=people)
    for student in everyone[1:]:
        student.is_waiting = True
    done = classroom.make_table(everyone, [], people)
    assert gradebook.format_csv(gradebook.list_columns(done), done).splitlines() == [
        "student,submission,email,name,section,score,max,note",
        "eve,eve,,,,,,not in the roster / not graded / the grader wrote no results: see eve.log",
        "jane@x.org,jane@x.org.zip,jane@x.org,Jane Doe,B,,,not graded yet",
        "team1,team1.zip,=ada@x.org,Ada L,A,,,not graded yet",
        "carl@x.org,,carl@x.org,Carl M,B,,,no submission",
    ]


# Merging and exporting

WEEK1 = """student,id,login,name,section,score,max,module 1,1.subgroups,written 1,note
ada,S1,ada,Ada L,A,7,8,7,0,5,
bob,S2,bob,Bob M,B,2,8,2,0,,
carl,S3,carl,=Carl,B,,8,,,,no submission
"""
LATE = """student,id,login,name,section,score,max,module 1,1.subgroups,note
ada,S1,ada,Ada L,A,8,8,8,1,
bob,S2,bob,Bob M,B,8,8,8,1,grade again
"""
WEEK2 = "student,score,max,module 2,2.volume,note\nada,8,8,8,2,\neve,4,8,4,0,not in the roster\n"


@pytest.fixture
def term(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("week1.csv", WEEK1), ("late.csv", LATE), ("week2.csv", WEEK2)):
        (tmp_path / name).write_text(text)

    def run(*options):
        assert cli.main(["gradebook", *options, "--out", "out.csv"]) == 0
        return list(csv.DictReader((tmp_path / "out.csv").read_text(encoding="utf-8-sig").splitlines()))

    return run


@pytest.mark.parametrize(
    ("options", "ada", "bob"),
    [
        (["--keep", "best"], ("21", "8", "1"), ("8", "8", "1")),  # Ada has 5 written points
        (["--keep", "best", "--late", "late.csv=20"], ("20", "7", "0"), ("6.4", "6.4", "1")),
        (["--keep", "last", "--late", "late.csv=20"], ("19.4", "6.4", "1"), ("6.4", "6.4", "1")),
    ],
)
def test_gradebooks_are_merged_module_by_module(options, ada, bob, term):
    table = {row["student"]: row for row in term("merge", "week1.csv", "late.csv", "week2.csv", *options)}
    assert list(table) == ["ada", "bob", "carl", "eve"]
    seen = [tuple(table[name][key] for key in ("score", "module 1", "1.subgroups")) for name in ("ada", "bob")]
    assert seen == [ada, bob]
    assert {row["max"] for row in table.values()} == {str(get_module(1).points + get_module(2).points + 6)}
    assert table["ada"]["written 1"] == "5" and table["ada"]["2.volume"] == "2"
    assert (table["carl"]["score"], table["carl"]["note"]) == ("", "week1.csv: no submission")
    assert [table["eve"][key] for key in ("score", "module 1", "note")] == ["4", "", "week2.csv: not in the roster"]
    late = " / module 1: 20 % off (late.csv)" if "--late" in options else ""
    assert table["bob"]["note"] == "late.csv: grade again" + late


def test_canvas_gets_its_columns(term):
    rows = term("export", "week1.csv", "--to", "canvas")
    assert list(rows[0]) == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Module 1", "Written 1"]
    assert list(rows[0].values()) == ["Points Possible", "", "", "", "", "8", "6"]
    assert list(rows[1].values()) == ["Ada L", "", "S1", "ada", "A", "7", "5"]
    assert list(rows[3].values()) == ["'=Carl", "", "S3", "carl", "B", "", ""]


def test_moodle_gets_one_identifier_and_the_grades(term, capfd):
    term("merge", "week1.csv", "week2.csv", "--keep", "best")
    (rows, printed) = term("export", "out.csv", "--to", "moodle"), capfd.readouterr().out
    assert rows[0] == {"ID number": "S1", "Module 1": "7", "Module 2": "8", "Written 1": "5"}
    assert [row["ID number"] for row in rows] == ["S1", "S2", "S3"]
    assert printed.endswith("  left out, because the roster does not identify them: eve\n")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["merge", "week1.csv", "advanced.csv", "--keep", "best"],
            "the core and the advanced modules have separate totals",
        ),
        (["merge", "other.csv", "--keep", "best"], "other.csv is not a gradebook of `brigade grade --class`"),
        (["merge", "words.csv", "--keep", "best"], "ada: module 1 has 'many' instead of points"),
        (["merge", "endless.csv", "--keep", "best"], "ada: module 1 has '1e999' instead of points"),
        (["merge", "below.csv", "--keep", "best"], "ada: module 1 has '-1' instead of points"),
        (
            ["merge", "week1.csv", "--keep", "best", "--late", "late.csv=20"],
            "with one of the gradebooks to merge",
        ),
        (["merge", "week1.csv", "--keep", "best", "--late", "week1.csv=all"], "at most 100 percent"),
        (["export", "week2.csv", "--to", "canvas"], "Canvas identifies students by canvas id or id or login, but"),
        (["export", "nowhere.csv", "--to", "moodle"], "nowhere.csv: No such file"),
    ],
)
def test_wrong_input_gets_one_line(options, line, term, tmp_path, capfd):
    cells = {"words": "many", "endless": "1e999", "below": "-1", "advanced": 1, "other": 40}
    for name, cell in cells.items():
        column = {"advanced": "module 9", "other": "shoe size"}.get(name, "module 1")
        (tmp_path / f"{name}.csv").write_text(f"student,{column}\nada,{cell}\n")
    assert cli.main(["gradebook", *options, "--out", "out.csv"]) == 2
    _, errors = capfd.readouterr()
    assert errors.startswith("brigade: ") and errors.count("\n") == 1 and line in errors, errors
