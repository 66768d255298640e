"""Bucket Brigade: the toolkit behind a course on data-parallel training, built step by step."""
