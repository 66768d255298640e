"""Likely causes of failures, one file per module. This code runs only after a check has failed."""
