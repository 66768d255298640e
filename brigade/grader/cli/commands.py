"""The commands of instructors: see `brigade/course/cli/commands.py`."""

from brigade.course.cli.commands import Command

PLACE = "brigade.grader.cli"
COMMANDS = (
    Command("grade", f"{PLACE}.grade", "Grade one submission, or a directory of submissions.",
            "brigade grade --submission DIR --out results.json"),
    Command("gradebook", f"{PLACE}.gradebook", "Merge gradebooks, or take marks for written answers into one.",
            "brigade gradebook merge week1.csv week2.csv --keep best --out grades.csv"),
    Command("term", f"{PLACE}.term", "Run the assignments of a term from one file.", "brigade term check"),
    Command("mark", f"{PLACE}.term", "Make a page on which a person marks written answers.", "brigade mark week1"),
    Command("oral", f"{PLACE}.oral", "Write a sheet for an oral exam from a student's own code.",
            "brigade oral ada.zip --seed 17"),
    Command("skeletons", f"{PLACE}.skeletons", "Generate the skeletons and the handout.",
            "brigade skeletons --check"),
)  # fmt: skip
