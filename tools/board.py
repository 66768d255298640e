"""Write the tables of the board in assignments.md again: python -m tools.board"""

from __future__ import annotations

from brigade.course.table.modules import ROOT, TRAINING_MODULES
from brigade.lab.ladder import PLANNED_TORCH, get_variant
from brigade.lab.score import format_rows, plan_rows

BOARD = ROOT / "assignments.md"
BEGIN, END = "<!-- made by python -m tools.board -->", "<!-- end -->"


def make_board() -> str:
    """Return the page with new tables: the reference's rows and torch's."""
    tables = "\n".join(format_rows(plan_rows([*map(get_variant, TRAINING_MODULES), *PLANNED_TORCH])))
    before, rest = BOARD.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    BOARD.write_text(make_board())
    print(f"{BOARD.relative_to(ROOT)} written")
