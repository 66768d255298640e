"""Grades one submission or a whole class. Only ranks import submissions; the verdict is computed here."""
