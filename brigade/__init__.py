"""Bucket Brigade: the toolkit behind a course on data-parallel training, built step by step."""

from brigade.ranks import dynamo_stub

dynamo_stub.postpone_imports()
