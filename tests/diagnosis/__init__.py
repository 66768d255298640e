"""Likely causes of failures, one file per module: what is asked only after a check has failed."""
