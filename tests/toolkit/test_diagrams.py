"""The concept diagrams in the readings are the diagrams that the code draws."""

import pytest
from matplotlib.testing.compare import compare_images

from brigade.course.modules import get_module
from tools.diagrams import DIAGRAMS, STANDALONE


@pytest.mark.parametrize(("number", "name", "draw_diagram"), DIAGRAMS)
def test_the_reading_has_the_diagram_that_the_code_draws(number, name, draw_diagram, tmp_path):
    drawn, stored = tmp_path / "drawn.png", get_module(number).lesson / f"{name}.png"
    draw_diagram(drawn)
    assert f"]({name}.png)" in (stored.parent / "README.md").read_text()
    difference = compare_images(str(stored), str(drawn), tol=3)
    assert difference is None, f"make figures MODULE={number}: {difference}"


@pytest.mark.parametrize(("stored", "draw_diagram"), STANDALONE, ids=lambda value: getattr(value, "stem", ""))
def test_a_page_without_a_module_has_the_picture_that_the_code_draws(stored, draw_diagram, tmp_path):
    draw_diagram(tmp_path / "drawn.png")
    assert compare_images(str(stored), str(tmp_path / "drawn.png"), tol=3) is None
