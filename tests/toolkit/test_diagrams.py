"""The concept diagrams in the readings are the diagrams that the code draws."""

import pytest
from matplotlib.testing.compare import compare_images

from brigade.course.modules import ROOT
from tools.diagrams import DIAGRAMS


@pytest.mark.parametrize("stored", DIAGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_stored_diagram_is_the_one_that_the_code_draws(stored, tmp_path):
    DIAGRAMS[stored](tmp_path / "drawn.png")
    difference = compare_images(str(stored), str(tmp_path / "drawn.png"), tol=3)
    assert difference is None, f"make figures: {difference}"
