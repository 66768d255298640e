"""`make lint` finds the words that the course does not use."""

import plain_words
import pytest


@pytest.mark.parametrize(
    "text, phrase", [("measured anew in every round", "anew"), ("skipped for\nwant of a GPU", "for want of")]
)
def test_a_phrase_is_found_with_its_line(text, phrase):
    [(line, found, instead)] = plain_words.find_phrases("First line.\n" + text)
    assert (line, found) == (2, phrase) and instead


@pytest.mark.parametrize("text", ["Run it again.", "`anew` is code", "the owner", "a dearth of it", "in turn"])
def test_other_text_is_not_found(text):
    assert not list(plain_words.find_phrases(text))
