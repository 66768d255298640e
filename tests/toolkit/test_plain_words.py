"""`make lint` finds the words that the course does not use."""

import json

import plain_words
import pytest


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("measured anew in every round", "anew"),
        ("a launch is\ndear on this link", "dear"),
        ("Whoever has the handle waits", "Whoever"),
        ("all of them, but for the last", "but for the"),
        ("skipped for\nwant of a GPU", "for want of"),
        ("two variants, in turns", "in turns"),
        ("a rank steps on the own shard", "the own"),
        ("the last but one bucket", "the last but one"),
    ],
)
def test_a_phrase_is_found_with_its_line(text, phrase):
    [(line, found, instead)] = plain_words.find_phrases("First line.\n" + text)
    assert (line, found) == (2 if "\n" not in text or phrase == "for want of" else 3, phrase)
    assert instead


@pytest.mark.parametrize("text", ["Run it again.", "`anew` is code", "the owner", "a dearth of it", "in turn"])
def test_other_text_is_not_found(text):
    assert not list(plain_words.find_phrases(text))


def test_the_command_names_file_and_line(tmp_path, capsys):
    notebook = tmp_path / "one.ipynb"
    notebook.write_text(json.dumps({"cells": [{"source": ["Plain.\n", "Draw it anew."]}]}))
    good = tmp_path / "good.md"
    good.write_text("Draw it again.\n")
    assert plain_words.main([str(good)]) == 0
    assert capsys.readouterr().out == ""
    assert plain_words.main([str(good), str(notebook)]) == 1
    assert capsys.readouterr().out == f"{notebook}:2: 'anew': write again\n"
