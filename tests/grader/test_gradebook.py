"""Gradebooks of a term: the roster, merging, and what a person adjusts. No submission is graded here."""

import csv

import pytest

from brigade.course.cli import main as cli
from brigade.course.table.modules import get_module
from brigade.grader import classroom, gradebook, merging, roster
from brigade.grader.gradebook import GraderFile, Row, read_gradebook
from brigade.ranks.errors import UserError

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
        with pytest.raises(UserError) as caught:
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
    table = gradebook.format_rows(classroom.make_table(everyone, people))
    snapshot("gradebook", table.lstrip("\ufeff").replace("\r\n", "\n"))


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
        (("best", ""), ("21", "8", "1"), ("8", "8", "1")),  # Ada has 5 written points
        (("best", "20"), ("20", "7", "0"), ("6.4", "6.4", "1")),
        (("last", "20"), ("20", "7", "0"), ("2", "2", "0")),  # the least late one is the last that counts
    ],
)
def test_gradebooks_are_merged_module_by_module(options, ada, bob, term, tmp_path):
    keep, late = options
    lines = LATE.splitlines()
    with_late = [f"{lines[0]},late", *(f"{line},{late}" for line in lines[1:])]
    (tmp_path / "late.csv").write_text("\n".join(with_late) + "\n")
    table = {row["student"]: row for row in term("merge", "week1.csv", "late.csv", "week2.csv", "--keep", keep)}
    assert list(table) == ["ada", "bob", "carl", "eve"]
    seen = [tuple(table[name][key] for key in ("score", "module 1", "1.subgroups")) for name in ("ada", "bob")]
    assert seen == [ada, bob]
    assert {row["max"] for row in table.values()} == {str(get_module(1).points + get_module(2).points + 6)}
    assert table["ada"]["written 1"] == "5" and table["ada"]["2.volume"] == "2"
    assert (table["carl"]["score"], table["carl"]["note"]) == ("", "week1.csv: absent")
    assert [table["eve"][key] for key in ("score", "module 1", "note")] == ["4", "", "week2.csv: stranger"]
    counts = "" if table["bob"]["score"] != "2" else "not counted, "
    off = " / module 1: 1.6 points off (late)" if table["bob"]["score"] == "6.4" else ""
    assert table["bob"]["note"] == f"{counts}late.csv: again{off}"


def test_what_lateness_took_off_is_added_up_over_the_rows_that_count(term, tmp_path):
    for name, module, row in (("a", 1, "ada,4,8,4,1.5"), ("b", 1, "ada,6,8,6,2"), ("c", 2, "ada,5,8,5,0.25")):
        (tmp_path / f"{name}.csv").write_text(f"student,score,max,module {module},taken off\n{row}\n")
    [ada] = term("merge", "a.csv", "b.csv", "c.csv", "--keep", "last")
    assert (ada["taken off"], ada["score"]) == ("2.25", "11")


@pytest.fixture
def export(tmp_path):
    def export(name, platform="canvas", keep="best"):
        """Export a gradebook as `brigade term export` does. Return the rows and the lines about what to know."""
        text, _, lines = merging.export(read_gradebook(tmp_path / name)[0], platform, keep, "week1")
        return list(csv.DictReader(text.splitlines())), lines

    return export


def test_canvas_gets_its_columns(term, export):
    rows, _ = export("week1.csv")
    assert list(rows[0]) == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Module 1", "Written 1"]
    assert list(rows[0].values()) == ["Points Possible", "", "", "", "", "8", "6"]
    assert list(rows[1].values()) == ["Ada L", "", "S1", "ada", "A", "7", "5"]
    assert list(rows[3].values()) == ["'=Carl", "", "S3", "carl", "B", "", ""]


def test_moodle_gets_one_identifier_and_the_grades(term, export):
    term("merge", "week1.csv", "week2.csv", "--keep", "best")
    rows, lines = export("out.csv", "moodle")
    assert rows[0] == {"ID number": "S1", "Module 1": "7", "Module 2": "8", "Written 1": "5"}
    assert [row["ID number"] for row in rows] == ["S1", "S2", "S3"]
    assert lines[-1].endswith(": eve")  # she is left out


HEAD = "student,submission,login,score,max,module 1,module 2,1.subgroups,comment,note\n"
FIRST, SECOND = "adalovelace_7_100_work.zip", "adalovelace_7_101_work-1.zip"
EDITED = f"""{HEAD}ada,{SECOND},ada,9,16,4,5,0,,
ada,{FIRST},ada,11,16,8,3,1,superseded,not graded / unreadable
bob,bob.zip,bob,10,16,8,8,1,,"late, 80 %"
carl,carl.zip,carl,16,16,"5,5",8,1,,
"""


@pytest.fixture
def edited(term, tmp_path):
    """Write a gradebook that is not the grader's, sorted, corrected and commented."""
    (tmp_path / "edited.csv").write_text(EDITED)
    return term


@pytest.mark.parametrize(("keep", "ada"), [("best", ("8", "5")), ("last", ("4", "5"))])
def test_an_export_has_one_row_for_each_student(keep, ada, edited, export):
    """The rows may be sorted in any order: the names of the uploads tell which is the last."""
    rows, lines = export("edited.csv", keep=keep)
    assert [row["SIS Login ID"] for row in rows] == ["", "ada", "bob", "carl"]
    assert (rows[1]["Module 1"], rows[1]["Module 2"]) == ada
    assert any(line.endswith(f": {SECOND}; {FIRST}") for line in lines)


def test_a_score_that_is_not_the_sum_is_named_and_the_sum_counts(term, tmp_path, capfd, snapshot):
    (tmp_path / "edited.csv").write_text(EDITED.replace(",9,16,4", ",excused,16,4"))
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


# What a person writes beside the grader's file


@pytest.fixture
def graded(tmp_path):
    """Write a gradebook as the grader does. Return a function that reads it with the adjustments of a person."""
    path = tmp_path / "grades.csv"
    gradebook.get_results_path(path).mkdir()
    rows = [Row("ada", FIRST, {"module 1": 8}), Row("ada", SECOND, {"module 1": 4}), Row("=bob", "=bob.zip")]
    rows += [Row("carl", texts={"note": "no submission"})]
    GraderFile(path).write(rows, [get_module("1")])

    def read(text, encoding="utf-8"):
        (tmp_path / "adjustments.csv").write_bytes(text.encode(encoding))
        found, lines = read_gradebook(path)
        assert lines == []
        return {row.submission or row.student: row for row in found}

    return read


def test_the_grader_makes_a_file_for_a_person_once(graded, tmp_path):
    path = tmp_path / "adjustments.csv"
    columns = "student,submission,module 1,written 1,late,adjustment,comment"
    assert path.read_text(encoding="utf-8-sig").strip() == columns
    path.write_text(mine := columns + "\ncarl,,7,,,,\n")
    GraderFile(tmp_path / "grades.csv").write([Row("eve", "eve.zip")], [get_module("1")])
    assert path.read_text() == mine


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_persons_cells_replace_the_graders(encoding, graded, tmp_path):
    before = (tmp_path / "grades.csv").read_bytes()
    text = "sep=;\nstudent;submission;module 1;written 1;late;comment;remark\n"
    text += f"ada;{SECOND};5,5;2;20;Well döne.;\ncarl;;3;;;;ill\n;'=bob.zip;1;;;;\n;;;;;;\n"
    rows = graded(text, encoding)
    assert (rows[SECOND].numbers, rows[FIRST].numbers) == (
        {"module 1": 5.5, "written 1": 2, "late": 20},
        {"module 1": 8},
    )
    assert (rows[SECOND].score, rows[SECOND].texts) == (7.5, {"comment": "Well döne."})
    assert (rows["carl"].score, rows["carl"].texts["remark"], rows["'=bob.zip"].score) == (3, "ill", 1)
    assert (tmp_path / "grades.csv").read_bytes() == before


NOT_JOINED = [
    "student,module 1\nada,7",
    "student,module 1\ndora,7",
    f"student,submission,module 1\ncarl,{FIRST},7",
    "student,submission,module 1\nada,old.zip,7",
    "student,module 1\ncarl,7\ncarl,6",
    "student,score\ncarl,7",
    "student,1.subgroups\ncarl,1",
    "student,late\ncarl,120",
    "module 1,comment\n,lost?",
    "student,module 1\ncarl,1e999",
    "student,module 1\ncarl,-1",
    "student,module 99\ncarl,1",
]


def test_what_fits_to_no_row_gets_one_line_and_is_never_lost(graded, snapshot):
    refusals = []
    for text in NOT_JOINED:
        with pytest.raises(UserError) as caught:
            gradebook.format_rows([*graded(text).values()])
        refusals.append(f"{caught.value}\n")
    snapshot("refusals.adjustments", "".join(refusals))


def test_a_grader_s_file_that_somebody_changed_is_neither_read_nor_overwritten(graded, term, refuse, tmp_path):
    path = tmp_path / "grades.csv"
    path.write_bytes(changed := path.read_bytes().replace(b",8,", b",7,", 1))
    for command in (["merge", path, "--keep", "best", "--out", "x.csv"], ["marks", path, "x.json"]):
        refuse("gradebook", *command)
    for action in (GraderFile, read_gradebook):
        with pytest.raises(UserError, match=r"grades\.csv is not what the grader wrote.* corrections into adjustments"):
            action(path)
    assert path.read_bytes() == changed


def test_the_file_stays_the_graders_if_it_is_killed_between_the_record_and_the_file(graded, tmp_path, monkeypatch):
    path = tmp_path / "grades.csv"
    with monkeypatch.context() as patch:
        patch.setattr(gradebook.formats, "write_bytes", lambda *_: 1 / 0)
        patch.setattr(gradebook.formats, "write", lambda path, text: path.write_text(text))
        with pytest.raises(ZeroDivisionError):
            GraderFile(path).write([Row("eve", "eve.zip")], [get_module("1")])
    for _ in range(2):
        GraderFile(path).write([Row("eve", "eve.zip")], [get_module("1")])
        assert [row.student for row in read_gradebook(path)[0]] == ["eve", "ada", "ada", "'=bob"]


def test_another_run_with_other_modules_keeps_the_points(graded, tmp_path):
    file = GraderFile(tmp_path / "grades.csv")
    file.write(
        [Row("ada", FIRST, {"module 2": 3}), Row("ada", SECOND, {"module 1": 5, "module 2": 2})], [get_module("2")]
    )
    rows = graded("student\n")
    assert rows[FIRST].numbers == {"module 1": 8, "module 2": 3} and rows[SECOND].numbers["module 1"] == 5


def test_a_first_line_that_names_the_delimiter_is_read(term, tmp_path):
    (tmp_path / "excel.csv").write_text("sep=;\n" + WEEK1.replace(",", ";"), encoding="utf-8-sig")
    assert term("merge", "excel.csv", "--keep", "best")[0] == term("merge", "week1.csv", "--keep", "best")[0] | {
        "note": ""
    }
    assert term("merge", "excel.csv", "--keep", "best")[0]["score"] == "12"


REFUSED = [
    ["merge", "nobody.csv", "--keep", "best"],
    ["merge", "week1.csv", "advanced.csv", "--keep", "best"],
    ["merge", "other.csv", "--keep", "best"],
    ["merge", "words.csv", "--keep", "best"],
    ["merge", "endless.csv", "--keep", "best"],
    ["merge", "below.csv", "--keep", "best"],
    ["merge", "nowhere.csv", "--keep", "best"],
    ["merge", "renamed.csv", "--keep", "best"],
]


def test_wrong_input_gets_one_line(term, export, refuse, tmp_path, snapshot):
    cells = {"words": "many", "endless": "1e999", "below": "-1", "advanced": 1, "other": 40}
    for name, cell in cells.items():
        column = {"advanced": "module 9", "other": "shoe size"}.get(name, "module 1")
        (tmp_path / f"{name}.csv").write_text(f"student,{column}\nada,{cell}\n")
    (tmp_path / "nobody.csv").write_text("student,module 1\nada,8\n,8\n")
    (tmp_path / "renamed.csv").write_text("name,submission,module 1\nada,ada,8\n")
    refusals = [refuse("gradebook", *options, "--out", "out.csv") for options in REFUSED]
    (tmp_path / "twins.csv").write_text("student,login,module 1\nada,ada,8\neve,ada,8\n")
    for name in ("twins.csv", "week2.csv"):
        with pytest.raises(UserError) as caught:
            export(name)
        refusals.append(f"brigade: {caught.value}\n")
    snapshot("refusals.gradebook", "".join(refusals))
