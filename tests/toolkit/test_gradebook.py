"""Gradebooks of a term: the roster, merging, and the files for Canvas and Moodle. No submission is graded here."""

import csv

import pytest

from brigade.course.cli import main as cli
from brigade.course.table.modules import CourseError, get_module
from brigade.grader import classroom, gradebook, roster
from brigade.grader.gradebook_file import GradebookFile

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
        (CANVAS, "doejane_12345_5025_naive_ddp.py", "jane"),
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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_roster_is_unicode_and_its_unused_columns_are_named(encoding, tmp_path):
    (tmp_path / "roster.csv").write_text("Vorname\tGröße\tE-Mail\nJörg\t40\tj@x.org\n", encoding=encoding)
    [person], ignored = roster.read_roster(tmp_path / "roster.csv")
    assert (person["name"], person["email"], ignored) == ("Jörg", "j@x.org", ["größe"])


NO_ROSTERS = {
    "two_emails": b"email\na@x.org\nA@x.org\n",
    "two_names": b"name\nJane\nJane\n",
    "no_key": b"shoe size\n40\n",
    "no_unicode": "name\nJörg\n".encode("cp1252"),
}


def test_what_is_no_roster_is_refused(tmp_path, snapshot):
    refusals = []
    for name, content in NO_ROSTERS.items():
        path = tmp_path / f"{name}.csv"
        path.write_bytes(content)
        with pytest.raises(CourseError) as caught:
            roster.read_roster(path)
        refusals.append(f"{caught.value}\n")
    snapshot("refusals.roster", "".join(refusals))


def test_a_gradebook_gets_the_rosters_columns(read, tmp_path, snapshot):
    (tmp_path / "class" / "eve").mkdir(parents=True)
    for name in ("jane@x.org.zip", "team1.zip"):
        (tmp_path / "class" / name).touch()
    people = read(HAND_MADE)
    everyone = classroom.list_students(tmp_path / "class", tmp_path / "grades.csv", people=people)
    for student in everyone[1:]:
        student.is_waiting = True
    done = classroom.make_table(everyone, [], people)
    snapshot("gradebook", gradebook.format_csv(gradebook.list_columns(done), done).replace("\r\n", "\n"))


# Merging and exporting

WEEK1 = """student,id,login,name,section,score,max,module 1,1.subgroups,written 1,note
ada,S1,ada,Ada L,A,7,8,7,0,5,
bob,S2,bob,Bob M,B,2,8,2,0,,
carl,S3,carl,=Carl,B,,8,,,,absent
"""
LATE = """student,id,login,name,section,score,max,module 1,1.subgroups,note
ada,S1,ada,Ada L,A,8,8,8,1,
bob,S2,bob,Bob M,B,8,8,8,1,again
"""
WEEK2 = "student,score,max,module 2,2.volume,note\nada,8,8,8,2,\neve,4,8,4,0,stranger\n"


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
    assert (table["carl"]["score"], table["carl"]["note"]) == ("", "week1.csv: absent")
    assert [table["eve"][key] for key in ("score", "module 1", "note")] == ["4", "", "week2.csv: stranger"]
    note, _, late = table["bob"]["note"].partition(" / ")
    assert note == "late.csv: again" and ("20 %" in late and "late.csv" in late) == bool(late) == ("--late" in options)


def test_what_lateness_took_off_is_added_up_over_the_rows_that_count(term, tmp_path):
    for name, module, row in (("a", 1, "ada,4,8,4,1.5"), ("b", 1, "ada,6,8,6,2"), ("c", 2, "ada,5,8,5,0.25")):
        (tmp_path / f"{name}.csv").write_text(f"student,score,max,module {module},taken off\n{row}\n")
    [ada] = term("merge", "a.csv", "b.csv", "c.csv", "--keep", "last")
    assert (ada["taken off"], ada["score"]) == ("2.25", "11")


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
    assert printed.endswith(": eve\n")  # she is left out


HEAD = "student,submission,login,score,max,module 1,module 2,1.subgroups,comment,note\n"
FIRST, SECOND = "adalovelace_7_100_work.zip", "adalovelace_7_101_work-1.zip"
EDITED = f"""{HEAD}ada,{SECOND},ada,9,16,4,5,0,,
ada,{FIRST},ada,11,16,8,3,1,superseded,not graded / unreadable
bob,bob.zip,bob,10,16,8,8,1,,"late, 80 %"
carl,carl.zip,carl,16,16,"5,5",8,1,,
"""


@pytest.fixture
def edited(term, tmp_path):
    """Write a gradebook that the grader wrote and a person has edited: sorted, corrected and commented."""
    (tmp_path / "edited.csv").write_text(EDITED)
    record = EDITED.replace(",10,16,8,8", ",16,16,8,8").replace('"5,5"', "8").replace("superseded", "")
    (tmp_path / "edited.csv.results").mkdir()
    (tmp_path / "edited.csv.results" / "grader.csv").write_text(record)
    return term


@pytest.mark.parametrize(("keep", "ada"), [("best", ("8", "5")), ("last", ("4", "5"))])
def test_an_export_has_one_row_for_each_student(keep, ada, edited, capfd):
    """The rows may be sorted in any order: the names of the uploads tell which is the last."""
    rows = edited("export", "edited.csv", "--to", "canvas", "--keep", keep)
    printed = capfd.readouterr().out
    assert [row["SIS Login ID"] for row in rows] == ["", "ada", "bob", "carl"]
    assert (rows[1]["Module 1"], rows[1]["Module 2"]) == ada
    assert f": {SECOND}; {FIRST}\n" in printed and f"(--keep {keep})" in printed


def test_a_corrected_score_is_an_adjustment(edited, capfd, snapshot):
    """Bob's score was written by a person. Carl's is the grader's, from before a person corrected his points."""
    rows = {row["SIS Login ID"]: row for row in edited("export", "edited.csv", "--to", "canvas")}
    exported = capfd.readouterr().out
    assert [rows[name]["Adjustment"] for name in ("", "ada", "bob", "carl")] == ["0", "", "-6", ""]
    assert (rows["bob"]["Module 1"], rows["carl"]["Module 1"]) == ("8", "5.5")
    merged = {row["student"]: row for row in edited("merge", "edited.csv", "--keep", "best")}
    snapshot("gradebook.corrected", exported + capfd.readouterr().out)
    assert [merged[name]["score"] for name in ("ada", "bob", "carl")] == ["13", "10", "13.5"]
    again = edited("merge", "out.csv", "--keep", "best")  # a merged gradebook has no record
    assert {row["student"]: row["score"] for row in again} == {name: row["score"] for name, row in merged.items()}
    assert "bob" not in capfd.readouterr().out


def test_a_score_without_a_record_is_named_and_the_sum_counts(term, tmp_path, capfd, snapshot):
    (tmp_path / "edited.csv").write_text(EDITED.replace("4,5,0,,", "4,5,0,,").replace(",9,16,4", ",excused,16,4"))
    term("merge", "edited.csv", "--keep", "last")
    snapshot("gradebook.unrecorded", capfd.readouterr().out)


def test_an_adjustment_counts_with_its_row(term, tmp_path, capfd, snapshot):
    rows = "student,submission,score,module 1,adjustment\nada,a,6,8,-2\nada,a-1,5,4,1\nbob,b,9,8,1\n"
    (tmp_path / "edited.csv").write_text(rows)
    merged = {row["student"]: row for row in term("merge", "edited.csv", "--keep", "best")}
    assert (merged["ada"]["score"], merged["ada"]["adjustment"], merged["bob"]["score"]) == ("6", "-2", "9")
    snapshot("gradebook.adjusted", capfd.readouterr().out)


def test_a_comment_stays_with_its_row(edited):
    """A comment on a row that does not count says so in the merged row."""
    (ada, *_) = edited("merge", "edited.csv", "week2.csv", "--keep", "last")
    assert ada["comment"] == f"not counted, edited.csv, {FIRST}: superseded"
    assert ada["note"] == f"not counted, edited.csv, {FIRST}: not graded / unreadable"
    assert ada["submission"] == f"{FIRST}; {SECOND}" and ada["login"] == "ada"
    (ada, *_) = edited("merge", "edited.csv", "--keep", "best")
    assert ada["comment"] == f"edited.csv, {FIRST}: superseded"


@pytest.mark.parametrize("action", [["merge", "--keep", "best"], ["export", "--to", "canvas"]])
@pytest.mark.parametrize("column", ["student", "submission", "module 2"])
def test_a_renamed_column_stops_and_changes_nothing(action, column, edited, refuse, tmp_path):
    (tmp_path / "edited.csv").write_text(EDITED.replace(column, "other", 1))
    refusal = refuse("gradebook", *action, "edited.csv", "--out", "none.csv")
    assert f"'{column}'" in refusal and not (tmp_path / "none.csv").exists()


def test_grading_again_does_not_write_beside_a_renamed_column(tmp_path):
    path = tmp_path / "gradebook.csv"
    results = gradebook.get_results_path(path)
    results.mkdir()
    row = {"student": "ada", "submission": "a", "score": "8", "max": "8", "module 1": "8"}
    GradebookFile(path, results).update([row], [get_module("1")])
    path.write_text(renamed := path.read_text().replace("module 1", "naive DDP"))
    with pytest.raises(CourseError, match="'module 1'"):
        GradebookFile(path, results).update([row], [get_module("1")])
    assert path.read_text() == renamed


def test_a_first_line_that_names_the_delimiter_is_read(term, tmp_path):
    (tmp_path / "excel.csv").write_text("sep=;\n" + WEEK1.replace(",", ";"), encoding="utf-8-sig")
    assert term("export", "excel.csv", "--to", "canvas") == term("export", "week1.csv", "--to", "canvas")
    assert term("merge", "excel.csv", "--keep", "best")[0]["score"] == "12"


REFUSED = [
    ["export", "twins.csv", "--to", "canvas"],
    ["merge", "nobody.csv", "--keep", "best"],
    ["merge", "week1.csv", "advanced.csv", "--keep", "best"],
    ["merge", "other.csv", "--keep", "best"],
    ["merge", "words.csv", "--keep", "best"],
    ["merge", "endless.csv", "--keep", "best"],
    ["merge", "below.csv", "--keep", "best"],
    ["merge", "week1.csv", "--keep", "best", "--late", "late.csv=20"],
    ["merge", "week1.csv", "--keep", "best", "--late", "week1.csv=all"],
    ["export", "week2.csv", "--to", "canvas"],
    ["export", "nowhere.csv", "--to", "moodle"],
    ["merge", "renamed.csv", "--keep", "best"],
]


def test_wrong_input_gets_one_line(term, refuse, tmp_path, snapshot):
    cells = {"words": "many", "endless": "1e999", "below": "-1", "advanced": 1, "other": 40}
    for name, cell in cells.items():
        column = {"advanced": "module 9", "other": "shoe size"}.get(name, "module 1")
        (tmp_path / f"{name}.csv").write_text(f"student,{column}\nada,{cell}\n")
    (tmp_path / "twins.csv").write_text("student,login,module 1\nada,ada,8\neve,ada,8\n")
    (tmp_path / "nobody.csv").write_text("student,module 1\nada,8\n,8\n")
    (tmp_path / "renamed.csv").write_text("name,submission,module 1\nada,ada,8\n")
    refusals = [refuse("gradebook", *options, "--out", "out.csv") for options in REFUSED]
    snapshot("refusals.gradebook", "".join(refusals))
