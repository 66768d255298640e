"""Isolation of the ranks that run a stranger's code."""
